"""A node of a running job goes dark: its workers are stopped with --fence-after=lease, and run on without it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from pathlib import Path

#: A rank 0 that would write checkpoints until it is told to stop.
_WORKER = """
import os, signal, sys
def stop(*_):
    print("told to stop", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
while True:
    signal.pause()
"""
_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=30"


@pytest.mark.parametrize("after", ["lease", "never"])
def test_a_dark_node_stops_its_workers_if_it_is_asked_to(tmp_path: Path, after: str) -> None:
    """The others go on in a round of two; the dark node says why it stops its workers, and is in the next round."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER, encoding="utf-8")
    with virtual_hosts(3) as hosts:
        command = (
            *(sys.executable, "-m", "elastic_run", "--nnodes=2:3", "--nproc-per-node=1", "--rdzv-id=j"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=h0:29400", f"--rdzv-conf={_CONF}", "--scale-up-delay=0"),
            *("--shutdown-timeout=5", str(script)),
        )
        agents = [host.start(command, env={"PET_FENCE_AFTER": after}, merge=True) for host in hosts]
        for agent in agents:
            agent.wait_line("rank . of 3", deadline=60)
        hosts[2].go_dark()
        for agent in agents[:2]:
            agent.wait_line("rank . of 2", deadline=60)
        if after == "lease":
            agents[2].wait_line(
                "stopping the workers: this node can't reach its job .--fence-after=lease.: no answer for"
            )
            agents[2].wait_line("told to stop")
            agents[2].wait_line("out of reach for .* the workers were stopped after .* s .--fence-after=lease.")
        else:
            agents[2].wait_line("has been out of reach for")
            assert "told to stop" not in agents[2].stdout
        hosts[2].come_to_light()
        for agent in agents:
            agent.wait_line("new round: 3 nodes", deadline=60)
