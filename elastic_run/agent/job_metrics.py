"""Counts the events of this node's part of the job, for `--metrics-port`. The events are those of the event log."""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Causes that are counted by name. The program chooses the names of its exceptions, so their number needs a limit.
_CAUSES = 64
_OTHER_CAUSES = "other"

#: Event and field of each duration, the name of its metric, and its help text.
DURATIONS = (
    ("round_formed", "rendezvous_s", "rendezvous", "Seconds in which the node waited for a place in a round."),
    ("workers_started", "start_s", "start", "Seconds that the start of the workers took."),
    ("first_output", "after_s", "first_output", "Seconds from a worker's start to its first output."),
    ("workers_stopping", "detected_s", "detection", "Seconds from a failure to the stop of the other workers."),
    ("workers_stopped", "stop_s", "stop", "Seconds until no process of the round lived."),
    ("workers_started", "recovery_s", "recovery", "Seconds from the end of a round to running workers."),
)


@dataclass(slots=True)
class Counts:
    """The counts at one moment.

    Args:
        node: Host name.
        run_id: Id of the job.
        began_at: Monotonic seconds at which the agent began.
        restarts: Restarts of the job.
        rounds: Rounds in which this node took part.
        nodes: Nodes in the last round.
        workers: Workers in the last round, on all nodes.
        local_workers: Workers that run on this node.
        failures: First failures of rounds on this node, by cause.
        durations: Number and sum of the seconds of each duration, by its metric.
        running_s: Seconds in which all workers of this node ran, up to `running_since`.
        running_since: Monotonic seconds since which they run, or None.
    """

    node: str = ""
    run_id: str = ""
    began_at: float = 0.0
    restarts: int = 0
    rounds: int = 0
    nodes: int = 0
    workers: int = 0
    local_workers: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    durations: dict[str, tuple[int, float]] = field(default_factory=dict)
    running_s: float = 0.0
    running_since: float | None = None


class JobMetrics:
    """Folds events into counts.

    Attributes:
        counts: The counts so far.
    """

    def __init__(self) -> None:
        self.counts = Counts()

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event."""
        name, now = event["event"], event["monotonic"]
        self.counts.restarts = max(self.counts.restarts, event["restart"])
        self._add_durations(event)
        if name == "workers_started":
            self.counts.running_since = now
        elif name == "workers_stopping" or (name == "worker_exited" and event["exit_code"] != 0):
            self._stop_running(now)
        self._count(name, event)

    def _add_durations(self, event: dict[str, Any]) -> None:
        durations = self.counts.durations
        for name, key, metric, _ in DURATIONS:
            if event["event"] == name and event[key] is not None:
                number, total = durations.get(metric, (0, 0.0))
                durations[metric] = (number + 1, total + event[key])

    def _count(self, name: str, event: dict[str, Any]) -> None:
        counts = self.counts
        if name == "agent_started":
            counts.node, counts.run_id, counts.began_at = event["node"], event["run_id"], event["monotonic"]
        elif name == "round_formed":
            counts.rounds += 1
            counts.nodes, counts.workers = event["nodes"], event["workers"]
        elif name == "worker_started":
            counts.local_workers += 1
        elif name == "worker_exited":
            counts.local_workers -= 1
        elif name == "worker_failed" and event["is_root"]:
            self._count_failure(_name_cause(event))

    def _stop_running(self, now: float) -> None:
        if self.counts.running_since is not None:
            self.counts.running_s += now - self.counts.running_since
            self.counts.running_since = None

    def _count_failure(self, cause: str) -> None:
        failures = self.counts.failures
        known = cause if cause in failures or len(failures) < _CAUSES else _OTHER_CAUSES
        failures[known] = failures.get(known, 0) + 1


def _name_cause(event: dict[str, Any]) -> str:
    """Return the kind of a failure: the exception's type, the signal, or the exit code."""
    return event["cause"].partition(":")[0][:80] or event["signal"] or f"exit code {event['exit_code']}"
