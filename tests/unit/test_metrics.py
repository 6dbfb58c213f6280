"""Metrics: groups, handlers, the decorator, Prometheus, and the counts that the metrics port shows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from elastic_run import metrics
from elastic_run.agent.http_server import MetricsPort
from elastic_run.metrics import MetricData


class _Heard(metrics.MetricHandler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.data: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.data.append(metric_data)

    def values(self) -> dict[str, int]:
        return {data.name: data.value for data in self.data}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> _Heard:
    """Hear the group of the launcher; the settings of the process are put back at the end."""
    monkeypatch.setattr(metrics, "_metrics_map", {})
    monkeypatch.setattr(metrics, "_default_metrics_handler", metrics.NullMetricHandler())
    handler = _Heard()
    metrics.configure(handler, "torchelastic")
    return handler


def test_a_metric_goes_to_its_group(heard: _Heard) -> None:
    """A value reaches the handler of its group with name, group and time, and no other group's."""
    before = time.time()
    metrics.put_metric("restarts", 1)
    metrics.put_metric("restarts", 2, "another")
    (data,) = heard.data
    assert (data.group_name, data.name, data.value) == ("torchelastic", "restarts", 1)
    assert before <= data.timestamp <= time.time()


def test_groups_without_a_handler_share_one(heard: _Heard) -> None:
    """A handler without a group takes all groups that have none of their own; at first that drops everything."""
    metrics.put_metric("lost", 1, "another")
    default = _Heard()
    metrics.configure(default)
    metrics.put_metric("found", 1, "another")
    metrics.put_metric("own", 1)
    assert default.values() == {"found": 1}
    assert heard.values() == {"own": 1}


def test_a_handler_that_raises_harms_nothing(
    heard: _Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that raises loses its value and is told of once; it gets the next, and so do the others."""

    class Failing(_Heard):
        def emit(self, metric_data: MetricData) -> None:
            super().emit(metric_data)
            raise ConnectionError

    monkeypatch.setattr(metrics, "_broken_handlers", [])
    failing = Failing()
    metrics.configure(failing, "theirs")
    for value in range(3):
        metrics.put_metric("step", value, "theirs")
    metrics.put_metric("step", 7)
    assert [data.value for data in failing.data] == [0, 1, 2]
    assert heard.values() == {"step": 7}
    (said,) = caplog.messages
    assert said == (
        "metric handler test_a_handler_that_raises_harms_nothing.<locals>.Failing of group 'theirs' raised "
        "ConnectionError on step: ; the job goes on (shown once)"
    )


def test_a_stream_keeps_the_handler_that_it_was_made_with(heard: _Heard) -> None:
    """A stream is a group and its handler of the moment."""
    stream = metrics.getStream("torchelastic")
    metrics.configure(_Heard(), "torchelastic")
    stream.add_value("kept", 1)
    assert (stream.group_name, heard.values()) == ("torchelastic", {"kept": 1})


def test_the_console_handler_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The console handler prints time, group, name and value on one line of standard output."""
    metrics.ConsoleMetricHandler().emit(MetricData(1.5, "group", "name", 7))
    metrics.NullMetricHandler().emit(MetricData(1.5, "group", "name", 7))
    assert capsys.readouterr().out == "[1.5][group]: name=7\n"


@metrics.prof
def _double(number: int) -> int:
    """Double it."""
    return 2 * number


class _Worker:
    @metrics.prof(group="mine")
    def fail(self, error: BaseException) -> None:
        raise error


def test_a_measured_function_tells_success_and_duration(heard: _Heard) -> None:
    """A function that returns is counted under module and name, with its duration in milliseconds."""
    assert _double(4) == 8
    values = heard.values()
    assert list(values) == ["test_metrics._double.success", "test_metrics._double.duration.ms"]
    assert values["test_metrics._double.success"] == 1
    assert 0 <= values["test_metrics._double.duration.ms"] < 1000
    assert (_double.__name__, _double.__doc__) == ("_double", "Double it.")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), ["_Worker.fail.failure", "_Worker.fail.duration.ms"]),
        (KeyboardInterrupt(), ["_Worker.fail.duration.ms"]),
    ],
)
def test_a_measured_method_tells_failure(heard: _Heard, error: BaseException, expected: list[str]) -> None:
    """A method that raises is counted as a failure in its group, an interruption as neither, and both go on."""
    metrics.configure(heard, "mine")
    with pytest.raises(type(error)):
        _Worker().fail(error)
    assert list(heard.values()) == expected
    assert heard.values().get("_Worker.fail.failure", 1) == 1


def test_deprecated_names_work_and_warn(heard: _Heard) -> None:
    """`profile` and `publish_metric` still work, with a warning that names what to use."""
    with pytest.warns(FutureWarning, match="use put_metric"):
        metrics.publish_metric("torchelastic", "old", 3)
    with pytest.warns(FutureWarning, match="use prof"):
        decorate = metrics.profile("torchelastic")
    assert decorate(lambda: 5)() == 5
    assert list(heard.values()) == ["old", "<lambda>.success", "<lambda>.duration.ms"]


# --- counts folded from the event log ---------------------------------------------------------------------------------
class _Counted:
    """The counts of one agent, which has begun at 100 s."""

    def __init__(self) -> None:
        self.metrics = MetricsPort(0)
        self.metrics.close()
        self.put("agent_started", 100.0, node="node7", run_id="job")

    def put(self, name: str, now: float, **fields: Any) -> None:
        """Take an event; each has these fields beside its own."""
        durations = {"rendezvous_s": None, "detected_s": None, "stop_s": None, "recovery_s": None, "start_s": None}
        self.metrics.count({"event": name, "monotonic": now, "restart": 0, **durations, **fields})


def test_before_the_first_round_there_is_nothing() -> None:
    """No node, no worker, no restart, and no second in which workers ran."""
    counts = _Counted().metrics
    assert (counts.node, counts.run_id, counts.began_at) == ("node7", "job", 100.0)
    assert [counts.restarts, counts.rounds, counts.nodes, counts.workers, counts.local_workers] == [0] * 5
    assert (counts.running_s, counts.running_since, counts.failures) == (0.0, None, {})


def test_workers_are_counted_while_they_run() -> None:
    """Those of the job by the round, those of this node by their starts and exits."""
    counted = _Counted()
    counted.put("round_formed", 101.0, nodes=3, workers=6)
    for _ in range(2):
        counted.put("worker_started", 102.0)
    counted.put("worker_exited", 103.0, exit_code=0)
    counts = counted.metrics
    assert (counts.rounds, counts.nodes, counts.workers, counts.local_workers) == (1, 3, 6, 1)


def test_workers_have_run_until_the_first_failure_or_the_stop() -> None:
    """A worker that succeeds is no failure; a restart begins to count again."""
    counted = _Counted()
    counted.put("workers_started", 110.0)
    counted.put("worker_exited", 115.0, exit_code=0)
    assert (counted.metrics.running_s, counted.metrics.running_since) == (0.0, 110.0)
    counted.put("worker_exited", 120.0, exit_code=3)
    counted.put("workers_stopping", 121.0)
    assert (counted.metrics.running_s, counted.metrics.running_since) == (10.0, None)
    counted.put("workers_started", 130.0)
    counted.put("workers_stopping", 134.0)
    assert counted.metrics.running_s == 14.0


def test_failures_are_counted_by_their_cause() -> None:
    """The first of each round: by the exception's type, the signal or the exit code."""
    counted = _Counted()
    for cause, signal, code in (("ValueError: no", None, 1), ("ValueError: yes", None, 1), ("", "SIGKILL", None)):
        counted.put("worker_failed", 120.0, is_root=True, cause=cause, signal=signal, exit_code=code)
    counted.put("worker_failed", 120.0, is_root=True, cause="", signal=None, exit_code=3)
    counted.put("worker_failed", 120.0, is_root=False, cause="KeyError: 'x'", signal=None, exit_code=1)
    assert counted.metrics.failures == {"ValueError": 2, "SIGKILL": 1, "exit code 3": 1}
