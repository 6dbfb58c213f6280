"""Requests over HTTP/1.1 to one of several servers of a cluster, as far as etcd needs it.

Rules
- One connection, kept open: a request costs a round trip. What streams (`open_answer`) takes a client of its own.
- Any server will do. The one that works is kept; where one fails, or says that it can't just now, the next one is
  asked, round and round until the time is over. So a request may be done twice: callers make that harmless.
- A server that says nothing is left for the next one soon, at first, and later in the next rounds.
- Built on `Stream`: everything has a deadline, and `close` may come from another thread. The standard library's client
  can do neither, and a stream that timed out once is lost with it.
"""

from __future__ import annotations

import ssl
import time

from elastic_run.store.dialing import connect_once
from elastic_run.store.errors import (
    FOREIGN,
    SILENT,
    UNREADY,
    StoreAccessError,
    StoreConnectionError,
    StoreTimeoutError,
    WireError,
)
from elastic_run.store.stream import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass
    from typing import TypeVar

    _T = TypeVar("_T")
else:
    from elastic_run.utils.light_dataclass import dataclass

_PAUSE = 0.05
_LAST_PAUSE = 0.5
_LEAST = 1e-3
#: Seconds after which a server that does not answer is left for the next, at first: without a leader etcd keeps
#: requests for six seconds before it says so, and a new leader is there after one or two.
_PATIENCE = 1.5
_LINES_AT_ONCE = 256
_BODY_LIMIT = 256 * 1024 * 1024
_UNAVAILABLE = (502, 503, 504)
_NO_BODY = (204, 304)


@dataclass
class Endpoint:
    """A server of the cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Credentials:
    """A user of the cluster."""

    user: str
    password: str


@dataclass
class Answer:
    """What a server answered.

    Args:
        status: HTTP's number.
        headers: By name in lower case.
        body: Empty while it streams.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def make_tls(cacert: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Describe how to talk TLS.

    Args:
        cacert: File of the certificates to trust; the system's if None.
        cert: File of our own certificate, if the servers ask for one.
        key: File of its key; in `cert` too if None.

    Returns:
        The context. The server's certificate must be valid for the name or address in the endpoint.

    Raises:
        StoreAccessError: A file can't be read or isn't what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=cacert)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:
        files = ", ".join(file for file in (cacert, cert, key) if file)
        message = f"can't use {files}: {error.strerror or error}"
        raise StoreAccessError(message) from error
    return context


class HttpClient:
    """A client of a cluster.

    Args:
        endpoints: The servers, in order of preference.
        timeout: Seconds for one request on all of them together.
        tls: How to talk TLS; plain if None.
    """

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self.timeout = timeout
        self._endpoints = list(endpoints)
        self._tls = tls
        self._stream: Stream | None = None
        self._is_closed = False

    def close(self) -> None:
        """Close the connection, from any thread; a request under way raises."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers, in the order in which they are asked."""
        return tuple(self._endpoints)

    @property
    def endpoint(self) -> Endpoint:
        """The server that is asked first."""
        return self._endpoints[0]

    def prefer_next(self) -> None:
        """Ask the next server from now on."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._endpoints.append(self._endpoints.pop(0))

    def connect(self) -> None:
        """See that a server can be reached.

        Raises:
            StoreConnectionError: None can.
            StoreAccessError: Its certificate, or ours, is refused.
        """
        self._try(self._connected)

    def clone(self) -> HttpClient:
        """Return another client of the cluster, not yet connected; it asks the same server first."""
        return HttpClient(self._endpoints, self.timeout, self._tls)

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a request.

        Args:
            method: `GET`, `POST` …
            path: What follows the host.
            body: The body.
            headers: More headers.

        Returns:
            The answer of the first server that is able to give one.

        Raises:
            StoreConnectionError: No server is, within the timeout.
            StoreAccessError: The server's certificate, or ours, is refused.
        """

        def once(timeout: float) -> Answer:
            stream = self._connected(timeout)
            deadline = time.monotonic() + timeout
            stream.send(_encode(method, path, self.endpoint, body, headers), timeout)
            answer = _receive_head(stream, deadline)
            answer.body = receive_body(stream, answer, deadline - time.monotonic())
            if answer.headers.get("connection", "").lower() == "close":
                stream.close()
                self._stream = None
            if answer.status in _UNAVAILABLE:
                message = f"{self.endpoint}: {answer.body[:200].decode(errors='replace').strip()}"
                raise StoreConnectionError(message, UNREADY)
            return answer

        return self._try(once)

    def open_answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[Stream, Answer]:
        """Send a request whose answer streams, in chunks, and takes up the connection from now on.

        Returns:
            The stream, at the answer's body, and the answer's head.

        Raises:
            StoreConnectionError: No server can be reached.
        """

        def once(timeout: float) -> tuple[Stream, Answer]:
            stream = self._connected(timeout)
            deadline = time.monotonic() + timeout
            stream.send(_encode(method, path, self.endpoint, body, headers), timeout)
            return stream, _receive_head(stream, deadline)

        return self._try(once)

    def _try(self, once: Callable[[float], _T]) -> _T:
        """Do something with each server in turn until it works."""
        deadline = time.monotonic() + self.timeout
        patience = _PATIENCE if len(self._endpoints) > 1 else self.timeout
        pause = _PAUSE
        failures = 0
        while True:
            left = deadline - time.monotonic()
            try:
                return once(max(min(left, patience), _LEAST))
            except (StoreConnectionError, StoreTimeoutError, WireError) as error:
                failure = self._give_up(error)
            failures += 1
            left = deadline - time.monotonic()
            if self._is_closed or failure.reason == FOREIGN or left <= pause:
                raise failure
            # A connection that broke while it was idle is no reason to wait; nor is one server of several.
            if failures % len(self._endpoints) == 0 and failures > 1:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
                patience *= 2  # if all are slow, to ask again and again makes them slower

    def _give_up(self, error: StoreConnectionError | StoreTimeoutError | WireError) -> StoreConnectionError:
        """Leave a server; returns what to say if no other one works."""
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            # With TLS 1.3 a server says so only after the greeting.
            message = f"{self.endpoint} refuses our certificate, or that we have none: {cause.reason}"
            raise StoreAccessError(message) from error
        message = f"{self.endpoint}: {error}" if str(self.endpoint) not in str(error) else str(error)
        self.prefer_next()
        reason = SILENT if isinstance(error, StoreTimeoutError) else FOREIGN
        reason = error.reason if isinstance(error, StoreConnectionError) else reason
        failure = StoreConnectionError(message, reason)
        failure.__cause__ = error
        return failure

    def _connected(self, timeout: float) -> Stream:
        if self._stream is None:
            self._stream = self._open(timeout)
        if self._is_closed:
            self._stream.close()
        return self._stream

    def _open(self, timeout: float) -> Stream:
        host = self.endpoint.host
        connected = connect_once(host, self.endpoint.port, timeout, dark_after=self.timeout)
        if self._tls is None:
            return Stream(connected, str(self.endpoint))
        try:
            connected.settimeout(timeout)
            return Stream(self._tls.wrap_socket(connected, server_hostname=host), str(self.endpoint))
        except TimeoutError as error:
            connected.close()
            message = f"{self.endpoint} does not answer"
            raise StoreConnectionError(message, SILENT) from error
        except ssl.SSLError as error:
            connected.close()
            message = f"{self.endpoint}: no TLS connection: {error.reason or error}"
            raise StoreAccessError(message) from error
        except OSError as error:
            connected.close()
            message = f"{self.endpoint}: {error}"
            raise StoreConnectionError(message) from error


class ChunkedLines:
    """A body that comes in chunks and is read by lines, such as a watch's.

    Args:
        stream: The stream, at the body.
        timeout: Seconds that the rest of a chunk may take once it has begun.
    """

    def __init__(self, stream: Stream, timeout: float) -> None:
        self._stream = stream
        self._timeout = timeout
        self._rest = b""

    def next_lines(self, timeout: float) -> list[bytes]:
        """Wait for lines.

        Args:
            timeout: Seconds.

        Returns:
            Those that have come, without empty ones; may be none.

        Raises:
            StoreConnectionError: The body is over.
        """
        lines: list[bytes] = []
        # What has come meanwhile too: a crowd's news are then one piece of work, not a thousand.
        while len(lines) < _LINES_AT_ONCE and self._stream.has_line(0.0 if lines else timeout):
            lines += self._take_chunk()
        return lines

    def _take_chunk(self) -> list[bytes]:
        try:
            chunk = receive_chunk(self._stream, self._timeout)
        except (StoreTimeoutError, WireError) as error:
            raise StoreConnectionError(str(error)) from error
        if not chunk:
            self._stream.close()
            message = "the server ended its answer"
            raise StoreConnectionError(message)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line for line in lines if line.strip()]


# --- messages --------------------------------------------------------------------------------------------------------
def _encode(method: str, path: str, endpoint: Endpoint, body: bytes, headers: Mapping[str, str]) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: {endpoint}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def _receive_head(stream: Stream, deadline: float) -> Answer:
    words = _receive_line(stream, deadline).split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():  # noqa: PLR2004 - version, status
        stream.close()
        message = "what listens there does not speak HTTP"
        raise StoreConnectionError(message, FOREIGN)
    headers: dict[str, str] = {}
    while line := _receive_line(stream, deadline):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(words[1]), headers, b"")


def receive_body(stream: Stream, answer: Answer, timeout: float) -> bytes:
    """Take an answer's body.

    Args:
        stream: The stream, at the body.
        answer: The answer's head.
        timeout: Seconds for all of it.

    Raises:
        StoreConnectionError: The connection is closed.
        StoreTimeoutError: It did not come in time.
        WireError: It has no length, or too great a one.
    """
    deadline = time.monotonic() + timeout
    if answer.status in _NO_BODY:
        return b""
    if answer.headers.get("transfer-encoding", "").lower() == "chunked":
        chunks = []
        while chunk := receive_chunk(stream, deadline - time.monotonic()):
            chunks.append(chunk)
        return b"".join(chunks)
    return stream.receive(_parse_size(answer.headers.get("content-length", ""), 10), deadline - time.monotonic())


def receive_chunk(stream: Stream, timeout: float) -> bytes:
    """Take the next piece of a body that comes in chunks.

    Args:
        stream: The stream, at a chunk.
        timeout: Seconds.

    Returns:
        The piece; nothing at the body's end.

    Raises:
        StoreConnectionError: The connection is closed.
        StoreTimeoutError: The whole piece did not come in time.
        WireError: It is no such body.
    """
    deadline = time.monotonic() + timeout
    size = _parse_size(_receive_line(stream, deadline).partition(";")[0], 16)
    chunk = stream.receive(size, deadline - time.monotonic())
    while _receive_line(stream, deadline):
        pass  # the line end that follows a chunk, or the last headers
    return chunk


def _receive_line(stream: Stream, deadline: float) -> str:
    return stream.receive_line(max(deadline - time.monotonic(), _LEAST)).decode("latin-1")


def _parse_size(text: str, base: int) -> int:
    try:
        size = int(text, base)
    except ValueError as error:
        message = f"a body of unknown length {text[:20]!r}"
        raise WireError(message) from error
    if not 0 <= size <= _BODY_LIMIT:
        message = f"a body of {size} bytes, over the limit of {_BODY_LIMIT}"
        raise WireError(message)
    return size
