"""Metrics of one node for Prometheus (`--metrics-port`), at ``/metrics``, through the package prometheus-client.

The counts are made from the events of the event log as they happen; a scrape asks the loop for them and writes them in
a thread of its own, so it costs the loop some microseconds. prometheus-client is imported by the first scrape.
"""

from __future__ import annotations

from elastic_run.agent.http_listener import HttpListener, ask_loop
from elastic_run.agent.job_metrics import DURATIONS, Counts, JobMetrics
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from elastic_run.loop import Loop

__all__ = ["MetricsPort"]

_PATH = "/metrics"
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one node at one moment.

    Args:
        counts: The counts so far.
        now: Monotonic seconds.
        state: State of the agent's machine.
        silences: Seconds since the last output of each worker that runs, by global rank.
    """

    counts: Counts
    now: float
    state: str
    silences: dict[int, float]


class MetricsPort:
    """Serves the metrics of one agent.

    Args:
        port: See `HttpListener`.

    Attributes:
        port: The port at which it listens.
        metrics: Takes the events.

    Raises:
        OSError: The port can't be taken.
    """

    def __init__(self, port: int) -> None:
        self._listener = HttpListener(port, "metrics")
        self.port = self._listener.port
        self.metrics = JobMetrics()

    def serve(self, loop: Loop, find_state: Callable[[], str], find_silences: Callable[[], dict[int, float]]) -> None:
        """Begin to answer.

        Args:
            loop: The agent's loop, which calls both functions.
            find_state: Returns the agent's state.
            find_silences: Returns seconds since the last output by global rank.
        """

        def look() -> Snapshot:
            counts = self.metrics.counts
            copied = replace(counts, failures=dict(counts.failures), durations=dict(counts.durations))
            return Snapshot(copied, loop.now(), find_state(), find_silences())

        def reply_to(path: str) -> tuple[int, str, bytes]:
            if path != _PATH:
                return 404, _TEXT, b"there is /metrics\n"
            snapshot = ask_loop(loop, look)
            return (503, _TEXT, b"the agent does not answer\n") if snapshot is None else (200, *_render(snapshot))

        self._listener.serve(reply_to)

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()


def _render(snapshot: Snapshot) -> tuple[str, bytes]:
    """Return the content type and the text of a scrape."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(snapshot))
    return prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(registry)


class _Collector:
    """The object that prometheus-client asks for metrics."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        snapshot, counts = self._snapshot, self._snapshot.counts
        info = GaugeMetricFamily("elastic_run_info", "The launcher, always 1.", labels=["node", "run_id", "state"])
        info.add_metric([counts.node, counts.run_id, snapshot.state], 1)
        yield info
        yield CounterMetricFamily("elastic_run_restarts", "Restarts of the job.", counts.restarts)
        yield CounterMetricFamily("elastic_run_rounds", "Rounds in which this node took part.", counts.rounds)
        yield GaugeMetricFamily("elastic_run_nodes", "Nodes in the last round.", counts.nodes)
        yield GaugeMetricFamily("elastic_run_workers", "Workers in the last round, on all nodes.", counts.workers)
        yield GaugeMetricFamily("elastic_run_local_workers", "Workers that run on this node.", counts.local_workers)
        failures = CounterMetricFamily(
            "elastic_run_failures", "First failures of rounds on this node.", labels=["cause"]
        )
        for cause, number in counts.failures.items():
            failures.add_metric([cause], number)
        yield failures
        for _, _, metric, text in DURATIONS:
            number, total = counts.durations.get(metric, (0, 0.0))
            yield SummaryMetricFamily(f"elastic_run_{metric}_seconds", text, number, total)
        silences = GaugeMetricFamily(
            "elastic_run_seconds_since_output", "Seconds since the last output of a worker that runs.", labels=["rank"]
        )
        for rank, seconds in snapshot.silences.items():
            silences.add_metric([str(rank)], seconds)
        yield silences
        since = 0.0 if counts.running_since is None else snapshot.now - counts.running_since
        running, wall = counts.running_s + since, max(1e-9, snapshot.now - counts.began_at)
        text = "Seconds in which all workers of this node ran and none had failed"
        yield CounterMetricFamily("elastic_run_running_seconds", f"{text}.", running)
        yield GaugeMetricFamily("elastic_run_goodput_ratio", f"{text}, by seconds since the start.", running / wall)
