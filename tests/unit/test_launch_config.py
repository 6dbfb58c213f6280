"""Values of a program that are refused before anything is started, as those of a command line are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_run.agent.api import WorkerSpec
from elastic_run.core.agent.config import AgentConfig
from elastic_run.core.job.config import JobConfig, NodeConfig, Window
from elastic_run.launcher import LaunchConfig, elastic_launch


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nproc_per_node": 10**400}, "^nproc_per_node is above the limit of 65536 workers on a node$"),
        ({"role": "\xe9" * 3000}, "^role: .* has 6000 bytes, and 4096 are allowed$"),
        ({"run_id": "x" * 5000}, "^run_id: .* has 5000 bytes, and 4096 are allowed$"),
        ({"run_id": "\udcff"}, r"^run_id: '\\udcff' is not UTF-8$"),
        ({"max_restarts": -1}, "^max_restarts: '-1' is not a whole number from 0 up$"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused(values: dict[str, Any], said: str) -> None:
    """Such a name was too long for the nodes' messages, and so many workers were counted for minutes."""
    with pytest.raises(ValueError, match=said):
        LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **values})


def test_no_number_is_no_interval() -> None:
    """As torch refuses an interval of 0."""
    with pytest.raises(AssertionError, match="monitor_interval must be above 0, got nan"):
        WorkerSpec("worker", 1, None, entrypoint="true", monitor_interval=math.nan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (AgentConfig(health_port=-2), "health_port: '-2' is not a port from 0 to 65535"),
        (AgentConfig(health_port=70000), "health_port: '70000' is not a port from 0 to 65535"),
        (AgentConfig(metrics_port=-2), "metrics_port: '-2' is not a port from 0 to 65535"),
        (AgentConfig(hang_timeout=-1), "hang_timeout: '-1' is neither auto nor a time of at least 1 second, .*"),
        (AgentConfig(hang_timeout=math.nan), "hang_timeout: 'nan' is neither auto nor a time .*"),
        (AgentConfig(hang_action="repot"), "hang_action: 'repot' is none of report, .*, did you mean 'report'[?]"),
        (AgentConfig(worker_store="rank1"), "worker_store: 'rank1' is none of auto, agent, rank0, torch.*"),
        (NodeConfig(preferred_rank=-3), "preferred_rank: '-3' is not a whole number from 0 up"),
        (
            NodeConfig(exit_barrier_timeout=-1.0),
            "exit_barrier_timeout: '-1.0' is not a number of seconds from 0 up, .*",
        ),
        (NodeConfig(health_check="sh -c 'x"), 'health_check: "sh -c \'x" is not a command: no closing quotation'),
        (NodeConfig(health_check_timeout=0), "health_check_timeout: '0' is not a time above 0"),
        (NodeConfig(fence_after="x"), "fence_after: 'x' is none of lease, never"),
        (JobConfig(no_restart_exit_codes=(3, 256)), "no_restart_exit_codes: '3,256' is not a list of exit codes .*"),
        (JobConfig(exclude_exit_codes=(0,)), "exclude_exit_codes: '0' is not a list of exit codes from 1 to 255 .*"),
        (JobConfig(exclude_exit_codes=(-9,)), "exclude_exit_codes: '-9' is not a list of exit codes .*"),
        (JobConfig(restart_window=Window(0, 60.0)), "restart_window: '0/60.0' is not N/PERIOD, .* N from 1 .*"),
        (JobConfig(restart_window=Window(0)), "restart_window: '0/1' is not N/PERIOD, .*"),
        (JobConfig(exclude_after=Window(0, 60.0)), "exclude_after: '0/60.0' is not N/PERIOD, .*"),
    ],
)
def test_a_setting_that_no_flag_takes_is_refused(settings: JobConfig | AgentConfig | NodeConfig, said: str) -> None:
    """A negative port was an OverflowError of the socket, and a negative time was taken."""
    name = {JobConfig: "job_config", AgentConfig: "agent_config", NodeConfig: "node_config"}[type(settings)]
    with pytest.raises(ValueError, match=f"^{said}$"):
        LaunchConfig(1, 1, 1, **{name: settings})  # type: ignore[arg-type]  # each has the type of its field


def test_settings_that_flags_would_take_are_taken() -> None:
    """The bounds themselves; `hang_timeout` of 0 is auto, and None is not given."""
    agent = AgentConfig(health_port=0, metrics_port=65535, hang_timeout=0, hang_action="fail", worker_store="rank0")
    node = NodeConfig(exit_barrier_timeout=0, health_check="true", health_check_timeout=0.1, fence_after="lease")
    job = JobConfig(restart_window=Window(1), membership_window=Window(0), no_restart_exit_codes=(1, 255))
    config = LaunchConfig(1, 1, 1, max_restarts=0, agent_config=agent, node_config=node, job_config=job)
    assert (config.agent_config, config.node_config, config.job_config) == (agent, node, job)


def test_no_name_and_no_endpoint_are_empty() -> None:
    """A program may pass on flags that its user has left out; torch runs such a job."""
    left_out: Any = None
    config = LaunchConfig(1, 1, 1, rdzv_backend="local", run_id=left_out, rdzv_endpoint=left_out)
    assert (config.run_id, config.rdzv_endpoint) == ("", "")
    assert elastic_launch(config, "true")() == {0: None}
