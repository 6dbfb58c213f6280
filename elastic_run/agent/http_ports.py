"""`--health-port` and `--metrics-port`: a cluster's health checks and Prometheus ask an agent over HTTP.

| port | path | answer |
|---|---|---|
| health | ``/healthz`` | 200: the agent's loop answers |
| health | ``/readyz`` | 200: this node's workers run; 503: nodes meet, or workers are being stopped or have ended |
| metrics | ``/metrics`` | counts of the events of the event log, through the package prometheus-client |
"""

from __future__ import annotations

import socket
import time

from elastic_run.agent.http_server import HttpServer
from elastic_run.core.agent.machine import RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from prometheus_client.metrics_core import Metric

    from elastic_run.agent.http_server import HttpRequest
    from elastic_run.agent.kept_memory import KeptMemories
    from elastic_run.loop import Loop

#: Causes that are counted by name. The program chooses the names of its exceptions, so their number needs a limit.
_CAUSES = 64
_OTHER_CAUSES = "other"
#: Event and field of each duration, the name of its metric, and its help text.
_DURATIONS = (
    ("round_formed", "rendezvous_s", "rendezvous", "Seconds in which the node waited for a place in a round."),
    ("workers_started", "start_s", "start", "Seconds that the start of the workers took."),
    ("first_output", "after_s", "first_output", "Seconds from a worker's start to its first output."),
    ("workers_stopping", "detected_s", "detection", "Seconds from a failure to the stop of the other workers."),
    ("workers_stopped", "stop_s", "stop", "Seconds until no process of the round lived."),
    ("workers_started", "recovery_s", "recovery", "Seconds from the end of a round to running workers."),
)


class HttpPort(HttpServer):
    """A port of one agent on all interfaces, since the clients are outside of a pod; 0 takes a free port.

    It is taken before anything is started, so that a port in use is bad input.

    Raises:
        OSError: The port can't be taken.
    """

    def __init__(self, port: int) -> None:
        try:
            listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except ValueError:  # a machine that has no IPv6 at all
            listener = socket.create_server(("", port))
        self.port: int = listener.getsockname()[1]
        super().__init__(listener)

    def serve_health(self, loop: Loop, find_state: Callable[[], str]) -> None:
        """Begin to answer health checks with the agent's state, such as `running`."""

        def answer(request: HttpRequest) -> None:
            state = find_state()
            status = 200 if request.path == "/healthz" or state == RUNNING else 503
            request.reply(status, f"{state}\n".encode())

        self.serve(loop, lambda request: _answer_path(request, ("/healthz", "/readyz"), answer))


def _answer_path(request: HttpRequest, paths: tuple[str, ...], answer: Callable[[HttpRequest], None]) -> None:
    if request.method not in {"GET", "HEAD"}:
        request.reply(405, b"GET and HEAD are answered\n")
    elif request.path not in paths:
        request.reply(404, f"there {'are' if len(paths) > 1 else 'is'} {' and '.join(paths)}\n".encode())
    else:
        answer(request)


class MetricsPort(HttpPort):
    """The port with the metrics of this node's part of the job, made from the events of the event log as they happen.

    `failures` are the first failures of rounds on this node, by cause. `durations` has the number and the sum of the
    seconds of each duration, by its metric. All workers of this node ran for `running_s` seconds up to `running_since`,
    a monotonic time, or None while not all of them run.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.node = self.run_id = ""
        self.restarts = self.rounds = self.nodes = self.workers = self.local_workers = 0
        self.failures: dict[str, int] = {}
        self.durations: dict[str, tuple[int, float]] = {}
        self.began_at = self.running_s = 0.0
        self.running_since: float | None = None

    def count(self, event: dict[str, Any]) -> None:
        """Count the next event."""
        name, now = event["event"], event["monotonic"]
        self.restarts = max(self.restarts, event["restart"])
        if self.running_since is not None and (name == "workers_stopping" or event.get("exit_code", 0) != 0):
            self.running_s += now - self.running_since
            self.running_since = None
        for of_event, key, metric, _ in _DURATIONS:
            if name == of_event and event[key] is not None:
                number, total = self.durations.get(metric, (0, 0.0))
                self.durations[metric] = (number + 1, total + event[key])
        if name == "agent_started":
            self.node, self.run_id, self.began_at = event["node"], event["run_id"], now
        elif name == "round_formed":
            self.rounds += 1
            self.nodes, self.workers = event["nodes"], event["workers"]
        elif name == "worker_started":
            self.local_workers += 1
        elif name == "workers_started":
            self.running_since = now
        elif name == "worker_exited":
            self.local_workers -= 1
        elif name == "worker_failed" and event["is_root"]:
            # By its kind: the exception's type, the signal, or the exit code.
            cause = event["cause"].partition(":")[0][:80] or event["signal"] or f"exit code {event['exit_code']}"
            known = cause if cause in self.failures or len(self.failures) < _CAUSES else _OTHER_CAUSES
            self.failures[known] = self.failures.get(known, 0) + 1

    def serve_metrics(
        self,
        loop: Loop,
        find_state: Callable[[], str],
        find_silences: Callable[[], dict[int, float]],
        kept: KeptMemories | None,
    ) -> None:
        """Begin to answer with the counts, the agent's state, seconds since a rank's last output, and kept state."""
        self._find_state, self._find_silences, self._kept = find_state, find_silences, kept
        self.serve(loop, lambda request: _answer_path(request, ("/metrics",), self._answer))

    def _answer(self, request: HttpRequest) -> None:
        import prometheus_client  # by the first scrape, so that no worker waits for it

        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        request.reply(200, prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics; prometheus-client asks for them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        now = time.monotonic()
        info = GaugeMetricFamily("elastic_run_info", "The launcher, always 1.", labels=["node", "run_id", "state"])
        info.add_metric([self.node, self.run_id, self._find_state()], 1)
        yield info
        yield CounterMetricFamily("elastic_run_restarts", "Restarts of the job.", self.restarts)
        yield CounterMetricFamily("elastic_run_rounds", "Rounds in which this node took part.", self.rounds)
        yield GaugeMetricFamily("elastic_run_nodes", "Nodes in the last round.", self.nodes)
        yield GaugeMetricFamily("elastic_run_workers", "Workers in the last round, on all nodes.", self.workers)
        yield GaugeMetricFamily("elastic_run_local_workers", "Workers that run on this node.", self.local_workers)
        text = "First failures of rounds on this node."
        failures = CounterMetricFamily("elastic_run_failures", text, labels=["cause"])
        for cause, number in self.failures.items():
            failures.add_metric([cause], number)
        yield failures
        for _, _, metric, text in _DURATIONS:
            number, total = self.durations.get(metric, (0, 0.0))
            yield SummaryMetricFamily(f"elastic_run_{metric}_seconds", text, number, total)
        text = "Seconds since the last output of a worker that runs."
        silences = GaugeMetricFamily("elastic_run_seconds_since_output", text, labels=["rank"])
        for rank, seconds in self._find_silences().items():
            silences.add_metric([str(rank)], seconds)
        yield silences
        if self._kept is not None:
            kept = self._kept.read_status()
            yield GaugeMetricFamily("elastic_run_kept_state_bytes", "Memory that --keep-state uses.", kept["used"])
            if kept["age"] is not None:
                text = "Seconds since the newest state was kept."
                yield GaugeMetricFamily("elastic_run_kept_state_age_seconds", text, kept["age"])
        since = 0.0 if self.running_since is None else now - self.running_since
        running, wall = self.running_s + since, max(1e-9, now - self.began_at)
        text = "Seconds in which all workers of this node ran and none had failed"
        yield CounterMetricFamily("elastic_run_running_seconds", f"{text}.", running)
        yield GaugeMetricFamily("elastic_run_goodput_ratio", f"{text}, by seconds since the start.", running / wall)
