"""The agent's HTTP server, in its loop: for the control socket, `--health-port` and `--metrics-port`.

- One request a connection. A client has `WAIT_LIMIT` seconds to ask and as many to take the answer, so a client that
  disappears or reads slowly leaves nothing behind, and never stalls the loop.
- An exception in an answer ends the connection, with status 500, and not the job.
- The health port answers `/healthz` with 200 while the loop runs, and `/readyz` with 200 while this node's workers run,
  otherwise 503; the metrics port `/metrics`, through the package prometheus-client.
- `http.server` would cost every job 15 ms and 2 MB for a parser of which it needs ten lines.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import time

from elastic_run.core.agent.machine import RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from prometheus_client.metrics_core import Metric

    from elastic_run.agent.kept_memory import KeptMemories
    from elastic_run.loop import Loop, Timer

#: Seconds for a client to ask, and to take the answer; and after which an answer is given up, whatever it waits for.
WAIT_LIMIT = 10.0
_ANSWER_WAIT = 120.0
#: Open connections. A new one ends the one that has been silent for longest: otherwise a stranger that sends a byte
#: now and then would keep the port from the kubelet, which would end the pod.
MOST = 16
#: Bytes of a request.
REQUEST_LIMIT = 1 << 16
#: Seconds without accepting, when there is no descriptor for a client.
_PAUSE = 1.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpServer:
    """Answers requests at a socket that listens, and closes it."""

    def __init__(self, listener: _socket.socket) -> None:
        listener.settimeout(0)
        self.listener = listener
        self.clients: dict[HttpRequest, None] = {}
        self._loop: Loop | None = None

    def serve(self, loop: Loop, answer: Callable[[HttpRequest], None]) -> None:
        """Begin to answer; `answer` takes a request, and calls its `reply` now or later, in the loop."""
        self._loop, self.answer = loop, answer
        loop.add_reader(self.listener.fileno(), lambda: self._accept(loop))

    def close(self) -> None:
        """Close the socket and end all connections; harmless when that was done."""
        if self.listener.fileno() >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self.listener.fileno())
            self.listener.close()
        for client in [*self.clients]:
            client.close()

    def _accept(self, loop: Loop) -> None:
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined] # noqa: SLF001 - `socket.accept` calls it
        except BlockingIOError:
            return
        except OSError:
            loop.remove_reader(self.listener.fileno())
            loop.call_later(_PAUSE, lambda: self.serve(loop, self.answer) if self.listener.fileno() >= 0 else None)
            return
        if len(self.clients) >= MOST:
            silent = next((client for client in self.clients if not client.method), None)
            if silent is None:
                _socket.close(fd)
                return
            silent.close()
        self.clients[HttpRequest(loop, fd, self)] = None


class HttpRequest:
    """A connection with one request; `method` is "" until the request is here, `path` has no query."""

    def __init__(self, loop: Loop, fd: int, server: HttpServer) -> None:
        self.method = ""
        self.path = ""
        self.body = b""
        self._loop = loop
        self._server = server
        self._socket = _socket.socket(fileno=fd)
        self._socket.settimeout(0)
        self._received = b""
        self._unsent = memoryview(b"")
        self._timer: Timer = loop.call_later(WAIT_LIMIT, self.close)
        loop.add_reader(fd, self._read)

    def reply(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        """Send the answer; harmless when there was one, or the client has gone."""
        if self._socket.fileno() < 0 or self._unsent:
            return
        head = (
            f"HTTP/1.0 {status} {_REASONS[status]}\r\nServer: elastic-run\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._wait(WAIT_LIMIT)
        self._unsent = memoryview(head.encode() + (b"" if self.method == "HEAD" else body))
        self._write()

    def close(self) -> None:
        """End the connection; harmless when it has ended."""
        fd = self._socket.fileno()
        if fd >= 0:
            self._timer.cancel()
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            self._socket.close()
            self._server.clients.pop(self, None)

    def _read(self) -> None:
        try:
            data = self._socket.recv(REQUEST_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data or self.method or len(self._received) > REQUEST_LIMIT:
            self.close()  # gone, or more than a request
            return
        try:
            is_whole = self._parse()
        except ValueError as error:
            self.reply(400, f"{error}\n".encode())
            return
        if not is_whole:
            return
        self._wait(_ANSWER_WAIT)
        try:
            self._server.answer(self)
        except Exception as error:  # noqa: BLE001 - a defect in one request must not end the job
            from elastic_run.utils import describe_exception

            text = f"internal error: {describe_exception(error)} (please report it)\n"
            self.reply(500, text.encode(errors="backslashreplace"))

    def _parse(self) -> bool:
        """Parse the bytes that have come; return whether they are a whole request. ValueError: they are none."""
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *fields = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != len(("method", "path", "version")) or not words[2].startswith("HTTP/1."):
            message = "this is not a request of HTTP/1"
            raise ValueError(message)
        named = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        if len(body) < int(named.get("content-length", "0")):
            return False
        self.method, self.path, self.body = words[0], words[1].partition("?")[0], body
        return True

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self.close()

    def _wait(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.close)


# --- --health-port and --metrics-port ---------------------------------------------------------------------------------
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
    """A port on all interfaces, as clients are outside of a pod, taken before anything starts; 0 is any. OSError."""

    def __init__(self, port: int) -> None:
        from elastic_run.utils import listen_everywhere

        listener = listen_everywhere(port)
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

    All workers of this node ran for `running_s` seconds up to `running_since`, None while not all of them run.
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
        find_shares: Callable[[], dict[int, float]] = dict,
    ) -> None:
        """Begin to answer with the counts, the agent's state, what is known of each rank, and kept state."""
        self._find_state, self._find_silences, self._kept = find_state, find_silences, kept
        self._find_shares = find_shares
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
        text = (
            "Share of the last minute in which the other ranks waited for a rank; the first node has it of all ranks."
        )
        behind = GaugeMetricFamily("elastic_run_behind_ratio", text, labels=["rank"])
        for rank, share in self._find_shares().items():
            behind.add_metric([str(rank)], share)
        yield behind
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
