"""Requests over HTTP/1.1 to one of several servers of a cluster, as far as etcd needs it.

Rules
- One connection, kept open: a request costs a round trip. What streams (`open_answer`) takes a client of its own.
- Any server will do. The one that works is kept; where one fails, or says that it can't just now, the next one is
  asked, round and round until the time is over. So a request may be done twice: callers make that harmless.
- A server that says nothing is left for the next one soon, at first, and later in the next rounds. When all have
  failed there is a pause before the next round, of random length: a crowd must not ask again in step (see `backoff`).
"""

from __future__ import annotations

import ssl
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.records import dataclass
from elastic_run.store.backoff import Backoff, draw_fraction
from elastic_run.store.connecting import connect_once, format_endpoint, reason_of
from elastic_run.store.errors import (
    FOREIGN,
    SILENT,
    UNREADY,
    StoreAccessError,
    StoreConnectionError,
    StoreTimeoutError,
    WireError,
)
from elastic_run.store.jobstore.http_connection import Answer, HttpConnection
from elastic_run.store.stream import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")

_PAUSE = 0.05
_LAST_PAUSE = 0.5
_LEAST = 1e-3
#: Seconds after which a server that does not answer is left for the next, at first: without a leader etcd keeps
#: requests for six seconds before it says so, and a new leader is there after one or two.
_WAIT_LIMIT = 1.5
_UNAVAILABLE = (502, 503, 504)


@dataclass
class Endpoint:
    """A server of the cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.host, self.port)


@dataclass
class Credentials:
    """A user of the cluster."""

    user: str
    password: str


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
        draw: Returns a random number from 0 to 1, for the pauses between attempts.

    Attributes:
        timeout: As given.
        draw: As given.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        timeout: float,
        tls: ssl.SSLContext | None = None,
        draw: Callable[[], float] = draw_fraction,
    ) -> None:
        self.timeout = timeout
        self.draw = draw
        self._endpoints = list(endpoints)
        self._tls = tls
        self._connection: HttpConnection | None = None
        self._is_closed = False

    def close(self) -> None:
        """Close the connection, from any thread; a request under way raises."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

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
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._endpoints = [*self._endpoints[1:], self._endpoints[0]]  # at once: another thread may `clone`

    def connect(self) -> None:
        """See that a server can be reached.

        Raises:
            StoreConnectionError: None can.
            StoreAccessError: Its certificate, or ours, is refused.
        """
        self._try(self._connected)

    def clone(self) -> HttpClient:
        """Return another client of the cluster, not yet connected; it asks the same server first."""
        return HttpClient(self._endpoints, self.timeout, self._tls, self.draw)

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
            connection = self._connected(timeout)
            deadline = time.monotonic() + timeout
            answer = connection.ask(method, path, body, headers, timeout)
            answer.body = connection.receive_body(deadline - time.monotonic())
            if answer.status in _UNAVAILABLE:
                message = f"etcd at {self.endpoint}: {answer.body[:200].decode(errors='replace').strip()}"
                raise StoreConnectionError(message, UNREADY)
            return answer

        return self._try(once)

    def open_answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[HttpConnection, Answer]:
        """Send a request whose answer streams, in chunks, and takes up the connection from now on.

        Returns:
            The connection, at the answer's body, and the answer's head.

        Raises:
            StoreConnectionError: No server can be reached.
        """

        def once(timeout: float) -> tuple[HttpConnection, Answer]:
            connection = self._connected(timeout)
            return connection, connection.ask(method, path, body, headers, timeout)

        return self._try(once)

    def _try(self, once: Callable[[float], _T]) -> _T:
        """Do something with each server in turn until it works."""
        deadline = time.monotonic() + self.timeout
        wait_limit = _WAIT_LIMIT if len(self._endpoints) > 1 else self.timeout
        backoff = Backoff(_PAUSE, _LAST_PAUSE, self.draw)
        failures, answer = 0, ""
        while True:
            left = deadline - time.monotonic()
            try:
                return once(max(min(left, wait_limit), _LEAST))
            except (StoreConnectionError, StoreTimeoutError, WireError) as error:
                failure = self._give_up(error, answer)
            if failure.reason == UNREADY:
                answer = str(failure)
            failures += 1
            left = deadline - time.monotonic()
            # A connection that broke while it was idle is no reason to wait; nor is one server of several.
            is_round_over = failures % len(self._endpoints) == 0 and failures > 1
            pause = backoff.next_pause() if is_round_over else 0.0
            if self._is_closed or failure.reason == FOREIGN or left <= max(pause, _PAUSE):
                raise failure
            if is_round_over:
                time.sleep(pause)
                wait_limit *= 2  # if all are slow, to ask again and again makes them slower

    def _give_up(
        self, error: StoreConnectionError | StoreTimeoutError | WireError, answer: str
    ) -> StoreConnectionError:
        """Leave a server; returns what to say if no other one works, with the last answer of a server that is busy."""
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            # With TLS 1.3 a server says so only after the greeting.
            message = f"{self.endpoint} refuses this node's certificate, or needs one: {cause.reason}"
            raise StoreAccessError(message) from error
        message = f"{self.endpoint}: {error}" if str(self.endpoint) not in str(error) else str(error)
        self.prefer_next()
        reason = SILENT if isinstance(error, StoreTimeoutError) else FOREIGN
        reason = error.reason if isinstance(error, StoreConnectionError) else reason
        failure = StoreConnectionError(message, reason, cause=getattr(error, "cause", ""), answer=answer)
        failure.__cause__ = error
        return failure

    def _connected(self, timeout: float) -> HttpConnection:
        if self._connection is None:
            self._connection = HttpConnection(self._open(timeout), str(self.endpoint))
        if self._is_closed:
            self._connection.close()
        return self._connection

    def _open(self, timeout: float) -> Stream:
        host, name = self.endpoint.host, str(self.endpoint)
        connected = connect_once(host, self.endpoint.port, timeout, dark_after=self.timeout)
        try:
            connected.settimeout(min(timeout, LONGEST_WAIT))
            return Stream(self._tls.wrap_socket(connected, server_hostname=host) if self._tls else connected, name)
        except OSError as error:
            connected.close()
            if isinstance(error, ssl.SSLError):
                message = f"{name}: no TLS connection: {error.reason or error}"
                raise StoreAccessError(message) from error
            message = f"{name} does not answer" if isinstance(error, TimeoutError) else f"{name}: {error}"
            raise StoreConnectionError(message, reason_of(error)) from error
