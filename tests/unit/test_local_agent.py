"""torch's hooks of `LocalElasticAgent`, as an agent that replaces some of them calls the others; starts no process."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run import contract, metrics
from elastic_run.agent import WorkerSpec, health_check_server, local_elastic_agent
from elastic_run.agent.local_elastic_agent import LocalElasticAgent
from elastic_run.agent.results import describe_failure
from elastic_run.agent.worker_launch import assign_ranks
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.multiprocessing import DefaultLogsSpecs
from elastic_run.multiprocessing.functions import start_processes
from elastic_run.rendezvous.registry import LocalRendezvousHandler
from tests.support.job_results import worker_end


def make_agent(**options: Any) -> LocalElasticAgent:
    """Make an agent of two workers, which are not started."""
    handler = LocalRendezvousHandler("job", local_addr="127.0.0.1")
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint="train")
    return LocalElasticAgent(spec, DefaultLogsSpecs(), **options)


def test_a_shutdown_ends_each_part_once() -> None:
    """The workers get the signal and the grace period, and the timers and the health check are served no more."""
    agent: Any = make_agent()
    calls: list[tuple[Any, ...]] = []
    agent._supervisor = SimpleNamespace(
        request_stop=lambda number: calls.append(("supervisor", number)),
        plugin_calls=SimpleNamespace(post=lambda _, call: call()),
    )
    agent._pcontext = SimpleNamespace(close=lambda *values: calls.append(("workers", *values)))
    agent._worker_watchdog = SimpleNamespace(stop=lambda: calls.append(("timers",)))
    agent._health_check_server = SimpleNamespace(stop=lambda: calls.append(("health check",)))
    agent._shutdown(signal.SIGINT, 7)
    stops = [("supervisor", signal.SIGINT), ("workers", signal.SIGINT, 7)]
    assert calls == [*stops, ("timers",), ("health check",)]
    agent._shutdown(signal.SIGINT, 7)
    assert calls[4:] == stops


def test_an_agent_that_has_started_nothing_shuts_down() -> None:
    """An error before the first round calls it, too."""
    make_agent()._shutdown()


@pytest.mark.parametrize(
    ("argument", "variable", "expected"), [(None, "", 0), (None, "4", 4), (0.0, "4", 0), (3, "4", 3)]
)
def test_the_uninterruptible_state_timeout(
    argument: float | None, variable: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument counts; torch's variable counts where there is none."""
    monkeypatch.setenv(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT, variable)
    assert make_agent(uninterruptible_state_timeout=argument)._context.options.stuck_timeout == expected


@pytest.mark.parametrize("port", ["", "8080"])
def test_the_health_check_is_served_where_the_user_asks_for_it(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable has its port, as for torch's agent: for our own agent, and for one that replaces other hooks."""
    started: list[str] = []
    monkeypatch.setenv(contract.ENV_HEALTH_CHECK_PORT, port)
    monkeypatch.setattr(health_check_server, "start", lambda port, _: started.append(port))
    monkeypatch.setattr(local_elastic_agent, "Supervisor", lambda *_, **__: SimpleNamespace())
    make_agent().supervise()
    assert started == [port] * bool(port)
    monkeypatch.setattr(start_processes, "start_processes", lambda **_: SimpleNamespace(pids=lambda: {0: 70, 1: 71}))
    agent = make_agent()
    group = agent.get_worker_group()
    assign_ranks(group, 0, 1, (0, 2, 0, 2))
    assert agent._start_workers(group) == {0: 70, 1: 71}
    assert started == [port] * 2 * bool(port)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exit code 3; its stderr ends with: the disk is gone"),
        ({"stderr_tail": ()}, "exit code 3; what it said stands on its stderr"),
        ({"exitcode": -9}, "Signal 9 (SIGKILL) received by PID 4701"),
        ({"exception": ExceptionText("ValueError", "no")}, "ValueError: no"),
        (
            {"exception": ExceptionText(contract.TIMER_EXPIRED, "scope 'a' expired")},
            "timer scope 'a' expired; exit code 3; what it said stands on its stderr",
        ),
    ],
)
def test_a_failed_worker_is_described_by_what_is_known(fields: dict[str, Any], message: str) -> None:
    """Its exception, or the last line of its stderr, or how it ended."""
    end = worker_end(1, **{"exitcode": 3, "stderr_tail": ("the disk is gone", " "), **fields})
    told: Any = describe_failure(end).message
    assert (told["message"] if isinstance(told, dict) else told).startswith(message)


class _Heard(metrics.MetricHandler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[tuple[str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.values.append((metric_data.name, metric_data.value))


def test_the_states_of_a_round_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the restarts that are left."""
    heard = _Heard()
    monkeypatch.setattr(metrics, "_metrics_map", {"torchelastic": heard})
    agent = make_agent()
    context: Any = agent._context
    for restarts, step in ((0, "RENDEZVOUS"), (0, "START"), (0, "FAILED"), (1, "RENDEZVOUS"), (1, "START")):
        context.agent = SimpleNamespace(restart_count=restarts)
        agent._publish_step(step, 12.9)
    told = [(3, "healthy"), (3, "failed"), (2, "healthy")]
    states = [value for value in heard.values if value[0].startswith("workers.")]
    assert states[::2] == [("workers.trainer.remaining_restarts", left) for left, _ in told]
    assert states[1::2] == [(f"workers.trainer.{state}", 1) for _, state in told]
