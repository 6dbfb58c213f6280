"""HTTP/1.1 as it lies in a stream: what is sent, and what comes back, as far as etcd needs it."""

from __future__ import annotations

import time

from elastic_run.records import dataclass
from elastic_run.store.errors import FOREIGN, StoreConnectionError, StoreTimeoutError, WireError
from elastic_run.store.limits import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_run.store.stream import Stream
_LEAST = 1e-3
_LINES_AT_ONCE = 256
_HEADERS_LIMIT = 256
_NO_BODY = (204, 304)


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


def encode(method: str, path: str, host: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a request as bytes.

    Args:
        method: `GET`, `POST` …
        path: What follows the host.
        host: The server, with its port.
        body: The body.
        headers: More headers.
    """
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def receive_head(stream: Stream, timeout: float) -> Answer:
    """Take an answer's head.

    Args:
        stream: The stream, where an answer begins.
        timeout: Seconds for all of it.

    Raises:
        StoreConnectionError: The connection is closed, or it is no HTTP.
        StoreTimeoutError: It did not come in time.
        WireError: A line is too long.
    """
    deadline = time.monotonic() + timeout
    words = _receive_line(stream, deadline).split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():  # noqa: PLR2004 - version, status
        stream.close()
        message = "what listens there does not speak HTTP"
        raise StoreConnectionError(message, FOREIGN)
    headers: dict[str, str] = {}
    for line in _receive_lines(stream, deadline):
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
        body = bytearray()
        while chunk := receive_chunk(stream, deadline - time.monotonic()):
            body += chunk
            _check_size(len(body))
        return bytes(body)
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
    for _ in _receive_lines(stream, deadline):
        pass  # the line end that follows a chunk, or the last headers
    return chunk


def _receive_lines(stream: Stream, deadline: float) -> Iterator[str]:
    """Take lines up to an empty one; there may not be more than a limit of them."""
    for _ in range(_HEADERS_LIMIT):
        line = _receive_line(stream, deadline)
        if not line:
            return
        yield line
    message = f"more than {_HEADERS_LIMIT} headers"
    raise WireError(message)


def _receive_line(stream: Stream, deadline: float) -> str:
    return stream.receive_line(max(deadline - time.monotonic(), _LEAST)).decode("latin-1")


def _parse_size(text: str, base: int) -> int:
    try:
        size = int(text, base)
    except ValueError as error:
        message = f"a body of unknown length {text[:20]!r}"
        raise WireError(message) from error
    _check_size(size)
    return size


def _check_size(size: int) -> None:
    if not 0 <= size <= MESSAGE_LIMIT:
        message = f"a body of {size} bytes, over the limit of {MESSAGE_LIMIT}"
        raise WireError(message)


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
        if len(self._rest) > MESSAGE_LIMIT:
            self._stream.close()
            message = f"the server sends a line of more than {MESSAGE_LIMIT} bytes"
            raise StoreConnectionError(message)
        return [line for line in lines if line.strip()]
