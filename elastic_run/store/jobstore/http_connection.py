"""One connection over which HTTP/1.1 requests go one after the other.

h11 reads and writes HTTP; the bytes come and go through a `Stream`, because everything here has a deadline, and `close`
may come from another thread. The standard library's client can do neither.
"""

from __future__ import annotations

import time

import h11

from elastic_run.records import dataclass
from elastic_run.store.errors import FOREIGN, StoreConnectionError, WireError
from elastic_run.store.limits import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from elastic_run.store.stream import Stream

#: Bytes of an answer's head, and of the line before a chunk.
_HEAD_LIMIT = 64 * 1024
#: What every answer begins with.
_START = b"HTTP/"
#: The status with which h11 answers a longer one.
_TOO_LONG = 431
#: Lines of a body that are read at once: a crowd's news are then one piece of work, not a thousand.
_LINES_AT_ONCE = 256


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


class HttpConnection:
    """A connection to one server.

    Args:
        stream: The bytes; the connection owns it from now on.
        host: The server, with its port.
    """

    def __init__(self, stream: Stream, host: str) -> None:
        self._stream = stream
        self._host = host
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_LIMIT)
        self._body = bytearray()
        self._is_body_complete = True

    def close(self) -> None:
        """Close the connection, from any thread; harmless when closed."""
        self._stream.close()

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow the last answer."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float) -> None:
        """Send a request.

        Args:
            method: `GET`, `POST` …
            path: The part of the URL after the host.
            body: The body.
            headers: More headers.
            timeout: Seconds.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: The server did not take it in time.
        """
        if self.is_reusable:
            self._http.start_next_cycle()
        every = [("Host", self._host), ("Content-Length", str(len(body))), *headers.items()]
        request = self._http.send(h11.Request(method=method, target=path, headers=every)) or b""
        request += self._http.send(h11.Data(data=body)) or b""
        self._http.send(h11.EndOfMessage())  # no bytes: the length is known
        self._stream.send(request, timeout)

    def receive_head(self, timeout: float) -> Answer:
        """Read the head of the answer.

        Args:
            timeout: Seconds for all of it.

        Raises:
            StoreConnectionError: The connection is closed, or this is not HTTP.
            StoreTimeoutError: It did not come in time.
            WireError: It is too long, or announces a body that is too large.
        """
        deadline = time.monotonic() + timeout
        start = b""
        try:
            while not isinstance(event := self._http.next_event(), h11.Response):
                if event is h11.NEED_DATA:
                    data = self._stream.receive_some(deadline - time.monotonic())
                    start = start or data
                    if not start.startswith(_START[: len(start)]):
                        self._refuse()  # h11 would wait for the end of a head
                    self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == _TOO_LONG:
                raise self._too_large(_HEAD_LIMIT) from error
            self._refuse()
        self._body.clear()
        self._is_body_complete = False
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        if int(headers.get("content-length", "0")) > MESSAGE_LIMIT:
            raise self._too_large(MESSAGE_LIMIT)
        return Answer(event.status_code, headers, b"")

    def has_body_data(self, timeout: float) -> bool:
        """Wait until more of the body has come, or its end.

        Args:
            timeout: Seconds; what has come by then is kept.

        Returns:
            Whether anything has come; False at the body's end, too.

        Raises:
            StoreConnectionError: The connection is closed.
            WireError: This is not such a body, or it is too large.
        """
        deadline = time.monotonic() + timeout
        while not self._is_body_complete:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self.close()
                message = f"{self._host} sends a body that is not HTTP: {error}"
                raise WireError(message) from error
            if event is h11.NEED_DATA:
                if not self._stream.has_data(deadline - time.monotonic()):
                    return False
                self._http.receive_data(self._stream.receive_some(0.0))
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > MESSAGE_LIMIT:
                    raise self._too_large(MESSAGE_LIMIT)
                return True
            else:
                self._is_body_complete = True
                return True
        return False

    def receive_body(self, timeout: float) -> bytes:
        """Read the rest of the body.

        Args:
            timeout: Seconds for all of it.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: It did not come in time.
            WireError: This is not such a body, or it is too large.
        """
        deadline = time.monotonic() + timeout
        while not self._is_body_complete:
            if not self.has_body_data(deadline - time.monotonic()):
                raise self._stream.out_of_time()
        return bytes(self._body)

    def receive_lines(self, timeout: float) -> list[bytes]:
        """Wait for whole lines of a body that streams, such as a watch's.

        Args:
            timeout: Seconds.

        Returns:
            The lines that have come, without empty ones; may be none.

        Raises:
            StoreConnectionError: The body is over, or is no such body.
        """
        deadline = time.monotonic() + timeout
        lines: list[bytes] = []
        searched = len(self._body)
        try:
            while len(lines) < _LINES_AT_ONCE and self.has_body_data(0.0 if lines else deadline - time.monotonic()):
                if self._body.find(b"\n", searched) >= 0:
                    *whole, self._body = self._body.split(b"\n")
                    lines += [bytes(line) for line in whole if line.strip()]
                searched = len(self._body)
        except WireError as error:
            raise StoreConnectionError(str(error)) from error
        if self._is_body_complete and not lines:
            self.close()
            message = "the server ended its answer"
            raise StoreConnectionError(message)
        return lines

    def _refuse(self) -> NoReturn:
        self.close()
        message = "what listens there does not speak HTTP"
        raise StoreConnectionError(message, FOREIGN)

    def _too_large(self, limit: int) -> WireError:
        self.close()
        return WireError(f"{self._host} answers with more than {limit} bytes in one piece")
