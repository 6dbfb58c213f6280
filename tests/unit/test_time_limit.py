"""The end of a job that the scheduler has announced: workers begin to save in time."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.agent.context import AgentOptions
from elastic_run.agent.driver.supervisor import Supervisor
from elastic_run.cli.make_config import make_config
from elastic_run.cli.request import read_request
from elastic_run.contract import ENV_STOP_TIME
from elastic_run.core.config import JobConfig, NodeConfig
from elastic_run.run import parse_args
from elastic_run.worker import stopping

if TYPE_CHECKING:
    from collections.abc import Mapping


def options(end_time: float, *, stops_in_time: bool = False, shutdown_timeout: float = 100.0) -> AgentOptions:
    """Return the options of an agent whose job ends at a time."""
    node_config = NodeConfig(end_time=end_time, stops_in_time=stops_in_time)
    return AgentOptions(JobConfig(), node_config, shutdown_timeout=shutdown_timeout)


def test_workers_are_told_the_grace_period_before_the_end() -> None:
    """With 5 s more for the launcher; without an end there is no such variable."""
    assert options(10_000.0).worker_variables == {ENV_STOP_TIME: "9895"}
    assert options(0.0).worker_variables == {}


@pytest.mark.parametrize("stops", [False, True])
def test_the_user_is_told_when_the_time_comes(stops: bool) -> None:
    """One line; with --requeue the workers are stopped as by a signal."""
    said: list[str] = []
    stopped: list[bool] = []
    supervisor: Any = SimpleNamespace(
        _options=options(time.time() + 105.1, stops_in_time=stops),
        _context=SimpleNamespace(say=said.append),
        _stop_without_signal=lambda *_: stopped.append(True),
    )
    Supervisor._tell_time_limit(supervisor)
    assert said[0].startswith("the job's time limit is in 105 s: " + ("stopping" if stops else "stop_requested()"))
    assert stopped == [True] * stops


@pytest.mark.parametrize(
    ("environ", "is_known"),
    [
        ({"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": "9999999999"}, True),
        ({"SLURM_JOB_END_TIME": "9999999999"}, False),
        ({"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": "1000"}, False),
        ({"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": "unknown"}, False),
    ],
)
def test_only_an_end_in_the_future_counts(environ: Mapping[str, str], *, is_known: bool) -> None:
    """A variable that is left of another job says nothing."""
    request = read_request(parse_args(["train.py"]), 1, environ)
    assert bool(make_config(request, dict(environ))[0].node_config.end_time) == is_known


@pytest.mark.parametrize(
    ("flag", "count", "stops"),
    [("--requeue=2", "", True), ("--requeue=2", "1", True), ("--requeue=2", "2", False), ("--requeue=0", "", False)],
)
def test_only_a_job_that_will_be_run_again_is_stopped_early(flag: str, count: str, *, stops: bool) -> None:
    """The last run that --requeue allows trains on to its end; it was stopped "to run the job again", and was not."""
    environ = {"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": "9999999999", "SLURM_RESTART_COUNT": count}
    request = read_request(parse_args([flag, "train.py"]), 1, environ)
    node_config = make_config(request, environ)[0].node_config
    assert (node_config.end_time, node_config.stops_in_time) == (9999999999.0, stops)


def test_a_worker_is_told_by_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """stop_requested() is true from the time on, without a signal."""
    for seconds, expected in ((3600, False), (-1, True)):
        monkeypatch.setenv(ENV_STOP_TIME, str(int(time.time()) + seconds))
        watch = stopping._Watch()
        monkeypatch.setattr(watch, "_catch", lambda _: None)
        watch.set_up()
        assert (watch.is_requested, watch.pid) == (expected, os.getpid())
