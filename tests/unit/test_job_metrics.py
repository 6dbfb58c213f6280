"""The counts that the metrics port shows, folded from the events of the log."""

from __future__ import annotations

from typing import Any

from elastic_run.agent.http_ports import MetricsPort


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
