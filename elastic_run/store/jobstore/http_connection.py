"""One connection over which HTTP/1.1 requests go one after the other.

urllib3 writes the requests and reads the answers; 1.26, which torchx wants, will do. In place of a socket it is given a
`Stream`: a timeout of urllib3 begins anew with each byte that comes, and its socket can't be closed while it waits.
"""

from __future__ import annotations

import io
import time
from contextlib import contextmanager

from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from elastic_run.records import dataclass
from elastic_run.store.errors import StoreConnectionError, StoreError, StoreTimeoutError, WireError
from elastic_run.store.limits import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeVar

    from elastic_run.store.stream import Stream

    _T = TypeVar("_T")

#: What every answer begins with.
_START = b"HTTP/"
_FOREIGN = "what listens there does not speak HTTP"
#: Bytes of a body, and lines of it, that are read at once: a crowd's news are one piece of work, not a thousand.
_PIECE = 64 * 1024
_LINES_AT_ONCE = 256
#: Seconds for the rest of a chunk that has begun to come, since urllib3 can't go on with it later.
_REST = 5.0


@dataclass
class Answer:
    """What a server answered.

    Args:
        status: HTTP's number.
        headers: By name, in whatever case.
        body: Empty while it streams.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpConnection:
    """A connection to one server. All timeouts are in seconds, for all of an operation.

    Args:
        stream: The bytes; the connection owns it from now on.
        host: The server, with its port.
    """

    def __init__(self, stream: Stream, host: str) -> None:
        self._stream = stream
        self._socket = _Socket(stream, host)
        self._connection = _Connection(self._socket, host)
        self._pool = HTTPConnectionPool("etcd")
        self._pool.ConnectionCls = lambda **_: self._connection  # type: ignore[assignment] # as good as a class
        self._line = bytearray()

    def close(self) -> None:
        """Close the connection, from any thread; harmless when closed."""
        self._stream.close()

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float) -> Answer:
        """Send a request, and return the head of its answer.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: The server did not answer in time.
            WireError: This is not HTTP, or announces a body that is too large.
        """
        self._socket.room = MESSAGE_LIMIT
        with self._ends_after(timeout):
            # No retries: `HttpClient` chooses the server that is asked next.
            self._answer = self._pool.urlopen(
                method, path, body, headers, retries=False, redirect=False, preload_content=False, decode_content=False
            )
            self._socket.check_room(self._answer.length_remaining or 0)
        self._pieces = self._answer.stream(_PIECE)
        return Answer(self._answer.status, self._answer.headers, b"")

    def has_body_data(self, timeout: float) -> bool:
        """Wait until more of the body has come, or its end; return whether it has, and False behind the end.

        Raises:
            StoreConnectionError: The connection is closed.
        """
        return not self._answer.closed and self._stream.has_data(timeout)

    def receive_body(self, timeout: float) -> bytes:
        """Return the rest of the body.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: It did not come in time.
            WireError: This is not such a body, or it is too large.
        """
        with self._ends_after(timeout):
            body = b"".join(self._pieces)
        if self._connection.sock is None:
            self.close()  # as the server said that it would
        return body

    def receive_lines(self, timeout: float) -> list[bytes]:
        """Wait for whole lines of a body that streams, such as a watch's.

        Returns:
            The lines that have come, without empty ones; may be none.

        Raises:
            StoreConnectionError: The body is over, or is no such body.
        """
        deadline = time.monotonic() + timeout
        lines: list[bytes] = []
        try:
            while len(lines) < _LINES_AT_ONCE and self.has_body_data(0.0 if lines else deadline - time.monotonic()):
                with self._ends_after(_REST):
                    piece = next(self._pieces, b"")
                self._line += piece
                if b"\n" in piece:
                    *whole, self._line = self._line.split(b"\n")
                    lines += [bytes(line) for line in whole if line.strip()]
                    self._socket.room = MESSAGE_LIMIT
        except (StoreTimeoutError, WireError) as error:
            raise StoreConnectionError(str(error)) from error
        if self._answer.closed and not lines:
            self.close()
            message = "the server ended its answer"
            raise StoreConnectionError(message)
        return lines

    @contextmanager
    def _ends_after(self, timeout: float) -> Iterator[None]:
        """Give urllib3 so many seconds, and raise what went wrong in place of what urllib3 makes of it."""
        self._socket.deadline = time.monotonic() + timeout
        try:
            yield
        except (HTTPError, StoreError, ValueError) as error:
            self.close()
            if isinstance(error, WireError):
                raise
            failure = self._socket.failure or WireError(_FOREIGN)
            raise failure from failure.__cause__ or error


class _Connection(HTTPConnection):
    """urllib3's connection. It never makes another one: over the stream that it was given it fails if that broke."""

    def __init__(self, given: _Socket, host: str) -> None:
        super().__init__(host)
        self._given = given

    def connect(self) -> None:
        self.sock = self._given


class _Socket(io.BufferedIOBase):
    """A stream in place of a socket, and of the file that urllib3 reads answers from. The stream's owner closes it."""

    def __init__(self, stream: Stream, host: str) -> None:
        self.deadline = 0.0
        self.is_start = True
        self.room = 0
        self.failure: StoreError | None = None
        self._stream = stream
        self._host = host

    def check_room(self, size: int) -> None:
        """See that the server may send so many bytes more."""
        if size > self.room:
            message = f"{self._host} answers with more than {MESSAGE_LIMIT} bytes in one piece"
            raise WireError(message)

    def sendall(self, data: bytes) -> None:
        self._call(self._stream.send, data)

    def peek(self, _size: int = 0) -> bytes:
        start = self._call(self._stream.peek)
        if self.is_start and not start.startswith(_START[: len(start)]):
            raise WireError(_FOREIGN)  # urllib3 would wait for the end of the line
        self.is_start = False
        return start

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            raise WireError(_FOREIGN)  # the length of a chunk, as the server says
        self.check_room(size)
        self.room -= size
        return self._call(self._stream.receive, size)

    def _call(self, operation: Callable[..., _T], *arguments: object) -> _T:
        try:
            return operation(*arguments, self.deadline - time.monotonic())
        except StoreError as error:
            self.failure = error
            raise

    def makefile(self, _mode: str) -> _Socket:
        return self

    def fileno(self) -> int:
        return self._call(lambda _: self._stream.fileno())

    def settimeout(self, _seconds: float | None) -> None:
        """Leave it to the deadline."""

    def close(self) -> None:
        """Leave it to the owner."""
