"""Events and metrics of an agent's steps: a job that restarts once, launched by torch's modules and by ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.torchrun import run_on

if TYPE_CHECKING:
    from pathlib import Path

#: The worker of each attempt waits until the agent has called its group healthy; the first attempt then fails.
_PROGRAM = """
import logging
launcher, metrics = get("torch.distributed.launcher.api"), get("torch.distributed.elastic.metrics")
handlers = get("torch.distributed.elastic.events.handlers")
os.mkfifo("healthy")
healthy = os.open("healthy", os.O_RDWR)

class Events(logging.Handler):
    def emit(self, record):
        event = json.loads(record.getMessage())
        metadata = event.pop("metadata")
        details = json.loads(metadata.pop("metadata"))
        tell("event", event["name"], event["source"], metadata["agent_restarts"], metadata["state"],
             sorted(metadata), sorted(details), isinstance(metadata["duration_ms"], float))

class Metrics(metrics.MetricHandler):
    def emit(self, data):
        tell("metric", data.group_name, data.name, data.value if data.name.startswith("workers.") else None)
        if data.name.endswith(".healthy"):
            os.write(healthy, b"\\n")

handlers._log_handlers["told"] = Events()
metrics.configure(Metrics())
config = launcher.LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="job",
    max_restarts=1, event_log_handler="told", monitor_interval=0.01)
command = 'read line < healthy; exit $((1 - TORCHELASTIC_RESTART_COUNT))'
launcher.elastic_launch(config, "bash")("-c", command)
"""


def test_steps_are_told_as_by_torch(tmp_path: Path) -> None:
    """The events come in torch's order with its fields, and every metric of torch's methods has its name and values."""
    found = {}
    for side in ("torch", "ours"):
        directory = tmp_path / side
        directory.mkdir()
        told = run_on(side, f"import os; os.chdir({str(directory)!r})\n{_PROGRAM}", directory)
        events = [event for kind, *event in told if kind == "event"]
        metrics = {tuple(metric) for kind, *metric in told if kind == "metric"}
        found[side] = events, metrics
    assert found["ours"][0] == found["torch"][0]
    assert found["ours"][1] == found["torch"][1]
    assert ["torchelastic", "workers.default_role.healthy", 1] in map(list, found["ours"][1])
    assert [event[3] for event in found["ours"][0] if event[0].endswith("ASSIGN_WORKER_RANKS")]
