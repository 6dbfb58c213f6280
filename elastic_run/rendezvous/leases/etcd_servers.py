"""Requests over HTTP to the servers of an etcd cluster, any of which will do.

Rules
- The server that works is kept, with its connection. Where one fails, or answers that it can't serve now, the next one
  is asked, round and round until the time is over. So a request may be done twice: callers make that harmless.
- A server that says nothing is left for the next one soon, at first, and later in the next rounds. When all have failed
  there is a pause before the next round, of random length: a crowd must not ask again in step (`Backoff`).
- The timeout is one for all of a request, its repetitions included. A timeout of Python's own begins anew with each
  byte that comes, so a server that sends byte by byte would hold the coordinator for ever (`_TimedReader`).
"""

from __future__ import annotations

import io
import ssl
import time
from http.client import HTTPConnection, HTTPException, IncompleteRead

from elastic_run.contract import LONGEST_WAIT
from elastic_run.files import read_user_file
from elastic_run.records import dataclass
from elastic_run.store.connecting import Backoff, connect_once, format_endpoint, reason_of
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, UNREADY, StoreAccessError, StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn, TypeVar

    from typing_extensions import Buffer  # for the type checker only: collections.abc has it from Python 3.12 on

__all__ = [
    "EtcdUser",
    "read_tls",
    "read_user",
]

#: torch's two etcd backends call the same things by different names.
_CERTIFICATE = ("cert", "ssl_cert")
_KEY = ("key", "ssl_cert_key")
_AUTHORITY = ("cacert", "ca_cert")
#: Bytes of a password's file; a device may have no end.
_LONGEST_PASSWORD = 1 << 16


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of the cluster."""

    name: str
    password: str


def read_user(conf: Mapping[str, Any]) -> EtcdUser | None:
    """Return the user, or None; raise ValueError for a wrong setting or an unreadable file."""
    user, password = str(conf.get("user", "")), str(conf.get("password", ""))
    path = conf.get("password_file")
    if path:
        try:
            password = read_user_file(str(path), _LONGEST_PASSWORD).decode().rstrip("\n")
        except OSError as error:
            message = f"rendezvous setting password_file={path}: {error.strerror}"
            raise ValueError(message) from error
        except UnicodeDecodeError as error:
            message = f"rendezvous setting password_file={path}: not a text in UTF-8"
            raise ValueError(message) from error
    if not user and not password:
        return None
    if not user:
        message = "rendezvous setting password needs user=NAME"
        raise ValueError(message)
    return EtcdUser(user, password)


def read_tls(conf: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return how to talk TLS, or None for plain HTTP; raise ValueError for a setting or a file that can't be used.

    A server's certificate must be valid for its name or address.
    """
    protocol = str(conf.get("protocol", "http")).strip().lower()
    if protocol not in ("http", "https"):
        message = f"rendezvous setting protocol={protocol!r}: not http or https"
        raise ValueError(message)
    files = [_either(conf, names) for names in (_AUTHORITY, _CERTIFICATE, _KEY)]
    given = ", ".join(file for file in files if file)
    if protocol == "http":
        if given:
            message = f"rendezvous setting protocol=http doesn't go with a certificate ({given}): give protocol=https"
            raise ValueError(message)
        return None

    authority, certificate, key = files
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        message = f"rendezvous settings for TLS: can't use {given}: {error.strerror or error}"
        raise ValueError(message) from error
    return context


def _either(conf: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    value = conf.get(names[0]) or conf.get(names[1])
    return None if value is None else str(value)


if TYPE_CHECKING:
    _T = TypeVar("_T")

#: Bytes of an answer: a lease and a text beside it are small.
_ANSWER_LIMIT = 1 << 20
_PAUSE, _LAST_PAUSE = 0.05, 0.5
_LEAST = 1e-3
#: Seconds after which a server that does not answer is left for the next, at first: without a leader etcd keeps
#: requests for six seconds before it says so, and a new leader is there after one or two.
_WAIT_LIMIT = 1.5


@dataclass
class Answer:
    """What a server answered.

    Args:
        status: HTTP's number.
        headers: By name, in small letters.
        body: All of it.
        endpoint: The server, for messages.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    endpoint: str


class EtcdServers:
    """The servers of a cluster.

    Args:
        endpoints: Their hosts and ports, at least one.
        timeout: Seconds for a request.
        tls: How to talk TLS; plain HTTP if None.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._endpoints = list(endpoints)
        self._timeout = timeout
        self._tls = tls
        self._socket: _TimedSocket | None = None
        self._connection: HTTPConnection | None = None

    def __str__(self) -> str:
        return "etcd at " + ",".join(format_endpoint(*endpoint) for endpoint in sorted(self._endpoints))

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._connection = None

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], read: Callable[[Answer], _T]) -> _T:
        """Send a request to the servers, one after the other, until one answers it.

        Args:
            method: `GET`, `POST` …
            path: What follows the host.
            body: The body.
            headers: More headers.
            read: Reads an answer; it raises `StoreConnectionError` if the next server may give a better one.

        Returns:
            What `read` returns.

        Raises:
            StoreConnectionError: No server is able to answer within the timeout.
            StoreAccessError: The server's certificate, or ours, is refused.
        """
        deadline = time.monotonic() + self._timeout
        wait_limit = _WAIT_LIMIT if len(self._endpoints) > 1 else self._timeout
        backoff = Backoff(_PAUSE, _LAST_PAUSE)
        failures, last_answer = 0, ""
        while True:
            try:
                left = deadline - time.monotonic()
                return read(self._ask_once(method, path, body, headers, max(min(left, wait_limit), _LEAST)))
            except StoreConnectionError as error:
                failure = self._name_endpoint(error)
            self.close()
            self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
            if failure.reason == UNREADY:
                last_answer = str(failure)
            failures += 1
            left = deadline - time.monotonic()
            # A connection that broke while it was idle is no reason to wait; nor is one server of several.
            is_round_over = failures % len(self._endpoints) == 0 and failures > 1
            pause = backoff.next_pause() if is_round_over else 0.0
            if failure.reason == FOREIGN or left <= max(pause, _PAUSE):
                failure.answer = last_answer
                raise failure
            if is_round_over:
                # All servers failed: nothing can be waited for until one of them takes a connection (law 2 allows it).
                time.sleep(pause)
                wait_limit *= 2  # if all are slow, to ask again and again makes them slower

    def _name_endpoint(self, error: StoreConnectionError) -> StoreConnectionError:
        """Return the error with the server as the user wrote it: a message may have its address only."""
        endpoint = format_endpoint(*self._endpoints[0])
        if endpoint in str(error):
            return error
        named = StoreConnectionError(f"{endpoint}: {error}", error.reason, cause=error.cause)
        named.__cause__ = error
        return named

    def _ask_once(self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        endpoint = format_endpoint(*self._endpoints[0])
        if self._socket is None or self._connection is None:
            self._socket = _TimedSocket(self._connect(endpoint, timeout))
            self._connection = HTTPConnection(*self._endpoints[0])
            self._connection.sock = self._socket  # as much of a socket as it uses
        self._socket.deadline = deadline
        try:
            self._connection.request(method, path, body, dict(headers))
            response = self._connection.getresponse()
            is_long = (response.length or 0) > _ANSWER_LIMIT
            content = b"" if is_long else response.read(_ANSWER_LIMIT + 1)
        except (OSError, HTTPException, ValueError) as error:
            self.close()
            _explain(error, endpoint)
        if is_long or len(content) > _ANSWER_LIMIT:
            message = f"{endpoint} answers with more than {_ANSWER_LIMIT} bytes"
            raise StoreConnectionError(message, FOREIGN)
        if response.length:
            message = f"{endpoint} closed the connection within an answer"
            raise StoreConnectionError(message, CLOSED)
        if response.will_close:
            self.close()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, headers, content, endpoint)

    def _connect(self, endpoint: str, timeout: float) -> socket.socket:
        host, port = self._endpoints[0]
        connected = connect_once(host, port, timeout, dark_after=self._timeout)
        try:
            connected.settimeout(min(timeout, LONGEST_WAIT))
            return connected if self._tls is None else self._tls.wrap_socket(connected, server_hostname=host)
        except OSError as error:
            connected.close()
            if isinstance(error, ssl.SSLError):
                message = f"{endpoint}: no TLS connection: {error.reason or error}"
                raise StoreAccessError(message) from error
            _explain(error, endpoint)


def _explain(error: Exception, endpoint: str) -> NoReturn:
    """Raise what an error of a connection means."""
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        # With TLS 1.3 a server says so only after the greeting.
        message = f"{endpoint} refuses this node's certificate, or needs one: {error.reason}"
        raise StoreAccessError(message) from error
    if not isinstance(error, OSError | IncompleteRead):
        message = f"{endpoint}: what listens there does not speak HTTP"
        raise StoreConnectionError(message, FOREIGN) from error
    reason = reason_of(error) if isinstance(error, OSError) else CLOSED
    message = f"{endpoint} does not answer" if reason == SILENT else f"{endpoint}: {error}"
    raise StoreConnectionError(message, reason) from error


class _TimedSocket:
    """A socket whose operations end at one deadline."""

    def __init__(self, connected: socket.socket) -> None:
        self.deadline = 0.0
        self._socket = connected

    def limit(self) -> socket.socket:
        """Return the socket, for one operation."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, LONGEST_WAIT))
        return self._socket

    def sendall(self, content: bytes) -> None:
        self.limit().sendall(content)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self))

    def close(self) -> None:
        self._socket.close()


class _TimedReader(io.RawIOBase):
    """What the answer to one request is read from; the socket stays open for the next one."""

    def __init__(self, timed: _TimedSocket) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        return self._timed.limit().recv_into(buffer)
