"""The agent's HTTP server, in its loop: for the control socket, `--health-port` and `--metrics-port`.

- One request a connection. A client has `WAIT_LIMIT` seconds to ask and as many to take the answer, so a client that
  disappears or reads slowly leaves nothing behind, and never stalls the loop.
- An exception in an answer ends the connection, with status 500, and not the job.
- A loop that hangs answers nobody; a probe of Kubernetes counts that as a failure, as it counts status 503.
- `http.server` would cost every job 15 ms and 2 MB for a parser of which it needs ten lines.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    """A connection with one request: it reads the request, lets the server answer it, writes the answer, and closes.

    `method` is "" until the request is here; `path` has no query.
    """

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
        """Parse the bytes that have come; return whether they are a whole request.

        Raises:
            ValueError: They are none.
        """
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
