"""Metrics of an agent's steps: torch's names, one call for each step of a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run import metrics
from elastic_run.agent.steps import FAILED, RENDEZVOUS, START, STOP, StepRecorder


class _Heard(metrics.MetricHandler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[tuple[str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.values.append((metric_data.name, metric_data.value))

    def take(self) -> list[tuple[str, int]]:
        taken, self.values = self.values, []
        return taken


def _call(name: str, duration_ms: int) -> list[tuple[str, int]]:
    return [(f"{name}.success", 1), (f"{name}.duration.ms", duration_ms)]


def test_each_step_of_a_round_is_one_call_of_torchs_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start is a restart; the state is told once per round, as a look at the workers that took no time."""
    heard = _Heard()
    monkeypatch.setattr(metrics, "_metrics_map", {"torchelastic": heard})
    spec = SimpleNamespace(role="trainer", event_log_handler="null")
    agent: Any = SimpleNamespace(get_worker_group=lambda: SimpleNamespace(spec=spec), put_metric=metrics.put_metric)
    remaining = iter([3, 3, 2])
    recorder = StepRecorder(agent, lambda: next(remaining))

    def look(remaining: int, state: str) -> list[tuple[str, int]]:
        names = (f"workers.trainer.{name}" for name in ("remaining_restarts", state))
        return [*_call("LocalElasticAgent._monitor_workers", 0), *zip(names, (remaining, 1), strict=True)]

    started = [
        *_call("LocalElasticAgent._start_workers", 7),
        *_call("SimpleElasticAgent._initialize_workers", 7),
    ]
    recorder.record(RENDEZVOUS, 12.9)
    assert heard.take() == _call("SimpleElasticAgent._rendezvous", 12)
    recorder.record(START, 7)
    recorder.put_state("healthy")
    assert heard.take() == [*started, *look(3, "healthy")]
    recorder.record(FAILED, 0)
    assert heard.take() == look(3, "failed")
    recorder.record(STOP, 5)
    assert heard.take() == _call("LocalElasticAgent._stop_workers", 5)
    recorder.record(START, 7)
    assert heard.take() == [*started, *_call("SimpleElasticAgent._restart_workers", 7), *look(2, "healthy")]


@pytest.mark.parametrize(("is_success", "outcome"), [(True, "success"), (False, "failure")])
def test_a_run_is_measured_in_milliseconds(monkeypatch: pytest.MonkeyPatch, *, is_success: bool, outcome: str) -> None:
    """From the agent's beginning to its end."""
    heard = _Heard()
    monkeypatch.setattr(metrics, "_metrics_map", {"torchelastic": heard})
    clock = iter([50.0, 52.5])
    monkeypatch.setattr("elastic_run.agent.steps.time", SimpleNamespace(monotonic=lambda: next(clock)))
    spec = SimpleNamespace(role="trainer", event_log_handler="null")
    agent: Any = SimpleNamespace(get_worker_group=lambda: SimpleNamespace(spec=spec), put_metric=metrics.put_metric)
    StepRecorder(agent, lambda: 0).put_run(is_success=is_success)
    name = "SimpleElasticAgent.run"
    assert heard.take() == [(f"{name}.{outcome}", 1), (f"{name}.duration.ms", 2500)]
