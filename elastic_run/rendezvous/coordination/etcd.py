"""etcd: requests over HTTP to any of a cluster's servers; and the lease over version 3, whose gateway takes JSON.

- Requests go to the server that answered last. If it fails, or answers that it can't serve now, the next server is
  asked, in a circle until the time is over. So etcd may carry out a request twice, and each request here allows that.
- Every etcd since 3.4 has the gateway. (The client libraries that exist pin years-old releases of grpc and protobuf,
  which training images have in other versions.)
- The key hangs on a lease of etcd, which removes the key when the lease expires. The lease's number follows from the
  holder's value: a grant that is done twice makes one lease, and who knows the holder can end its lease.
- The term is the revision at which the key was created.
- To take the lease from a holder that is dead, its lease is ended first. If another agent has the key by then, the key
  hangs on that agent's lease, and nothing happens to it.
"""

# ruff: noqa: D102 - LeaseStore says what the methods promise
from __future__ import annotations

import hashlib
import json
import math
import socket
import ssl
import threading
import time
from abc import abstractmethod
from base64 import b64decode, b64encode
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead

from elastic_run.contract import LONGEST_WAIT
from elastic_run.records import dataclass
from elastic_run.rendezvous.coordination.lease import COORDINATOR, LAST_ROUND, Holder, LeaseStore, job_path
from elastic_run.store.connecting import Backoff, connect_once, format_endpoint, reason_of
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, UNREADY, StoreAccessError, StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn, TypeAlias, TypeVar

    Document: TypeAlias = dict[str, Any]
    _T = TypeVar("_T")

#: Bytes of an answer: a lease and a text beside it are small.
_ANSWER_LIMIT = 1 << 20
_PAUSE, _LAST_PAUSE = 0.05, 0.5
#: Seconds after which a server that does not answer is left for the next, at first: without a leader etcd keeps
#: requests for six seconds before it says so, and a new leader is there after one or two.
_WAIT_LIMIT = 1.5

_OK = 200
_REFUSED = (400, 401, 403)
_SERVER_ERROR = 500
# gRPC's numbers, as the gateway gives them.
_NOT_FOUND = 5
_NOT_NOW = (4, 8, 14)  # deadline exceeded, resource exhausted, unavailable
#: What a request may meet: a lease that expires, a holder that leaves. Each is met once, not again and again.
_ATTEMPTS = 4


# --- requests --------------------------------------------------------------------------------------------------------
@dataclass
class Answer:
    """What a server answered: HTTP's number, headers by name in small letters, all of the body, and which server."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    endpoint: str


class EtcdServers:
    """The servers of a cluster: at least one host and port, seconds for a request, and TLS, or None for plain HTTP."""

    def __init__(self, endpoints: Sequence[tuple[str, int]], timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._endpoints = list(endpoints)
        self._timeout = timeout
        self._tls = tls

    def __str__(self) -> str:
        return "etcd at " + ",".join(format_endpoint(*endpoint) for endpoint in sorted(self._endpoints))

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], read: Callable[[Answer], _T]) -> _T:
        """Send a request to the servers, one after the other, until one answers it, and return what `read` returns.

        `read` raises `StoreConnectionError` if the next server may give a better answer.
        """
        deadline = time.monotonic() + self._timeout
        wait_limit = _WAIT_LIMIT if len(self._endpoints) > 1 else self._timeout

        def send(connection: HTTPConnection) -> None:
            connection.request(method, path, body, dict(headers))

        backoff = Backoff(_PAUSE, _LAST_PAUSE)
        failures, unready = 0, None
        while True:
            limit = min(wait_limit, deadline - time.monotonic())
            try:
                return read(self._ask_once(self._endpoints[0], send, limit))
            except StoreConnectionError as error:
                failure = error
            self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
            unready = failure if failure.reason == UNREADY else unready
            failures += 1
            is_round_over = failures % len(self._endpoints) == 0
            pause = backoff.next_pause() if is_round_over else 0.0
            if failure.reason == FOREIGN:
                raise failure
            if deadline - time.monotonic() <= max(pause, _PAUSE):
                raise unready or failure  # what a server itself has said tells more
            if is_round_over:
                # All servers failed: nothing can be waited for until one of them takes a connection.
                time.sleep(pause)
                wait_limit *= 2  # if all are slow, to ask again and again makes them slower

    def _ask_once(self, endpoint: tuple[str, int], send: Callable[[HTTPConnection], None], timeout: float) -> Answer:
        name, timeout = format_endpoint(*endpoint), min(max(timeout, 0.001), LONGEST_WAIT)
        deadline = time.monotonic() + timeout
        try:
            connected = connect_once(*endpoint, timeout, dark_after=self._timeout)
        except StoreConnectionError as error:
            message = str(error) if name in str(error) else f"{name}: {error}"  # it may name the address only
            raise StoreConnectionError(message, error.reason, cause=error.cause) from error

        def cut() -> None:
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

        # A timeout of Python's own begins anew with each byte that comes.
        guard = threading.Timer(deadline - time.monotonic(), cut)
        guard.daemon = True
        guard.start()
        connection = HTTPConnection(*endpoint)
        try:
            connected.settimeout(timeout)
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_hostname=endpoint[0])
            connection.sock = connected
            send(connection)
            with connection.getresponse() as response:
                is_long = (response.length or 0) > _ANSWER_LIMIT
                content = b"" if is_long else response.read(_ANSWER_LIMIT + 1)
            if time.monotonic() >= deadline:
                raise TimeoutError  # what was cut may look like an answer
        except (OSError, HTTPException, ValueError) as error:
            _explain(TimeoutError() if time.monotonic() >= deadline else error, name)
        finally:
            guard.cancel()
            connection.close()
            connected.close()
        if is_long or len(content) > _ANSWER_LIMIT:
            message = f"{name} answers with more than {_ANSWER_LIMIT} bytes"
            raise StoreConnectionError(message, FOREIGN)
        if response.length:
            message = f"{name} closed the connection within an answer"
            raise StoreConnectionError(message, CLOSED)
        return Answer(response.status, {key.lower(): value for key, value in response.headers.items()}, content, name)


def _explain(error: Exception, endpoint: str) -> NoReturn:
    """Raise what an error of a connection means."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        message = f"{endpoint}: no TLS connection, or none with this node's certificate: {error.reason or error}"
        raise StoreAccessError(message) from error
    if not isinstance(error, OSError | IncompleteRead):
        message = f"{endpoint}: what listens there does not speak HTTP"
        raise StoreConnectionError(message, FOREIGN) from error
    reason = reason_of(error) if isinstance(error, OSError) else CLOSED
    message = f"{endpoint} does not answer" if reason == SILENT else f"{endpoint}: {error}"
    raise StoreConnectionError(message, reason) from error


# --- the lease -------------------------------------------------------------------------------------------------------
class EtcdLease(LeaseStore):
    """A job's lease in an etcd cluster of either version; `prefix` is what comes before `elastic-run/`."""

    def __init__(
        self,
        servers: EtcdServers,
        run_id: str,
        *,
        prefix: str = "",
        secret: bytes | None = None,
    ) -> None:
        super().__init__(str(servers), run_id, secret)
        self._servers = servers
        self._root = f"{prefix}{job_path(run_id)}"

    def acquire(self, value: str, ttl: float, *, instead_of: Holder | None = None) -> Holder | None:
        for _ in range(_ATTEMPTS):
            holder = self.read()
            if holder is None:
                holder = self._create(value, ttl)
                if holder is not None:
                    return holder
            elif holder.value == value and self.renew(holder, ttl):
                return holder  # of an earlier attempt, whose answer was lost: its time to live has run since then
            elif holder.value == value or holder == instead_of:
                self.release(holder)
            else:
                break
        return None

    @abstractmethod
    def _create(self, value: str, ttl: float) -> Holder | None:
        """Create the key unless it is there; returns None if another agent was first, or the lease expired just now."""


class _LeaseGoneError(Exception):
    """The lease has expired, or was never granted."""


class EtcdV3Lease(EtcdLease):
    """A job's lease as a key of etcd's version 3, on a lease of etcd."""

    def read(self) -> Holder | None:
        return self._parse(self._call("kv/range", {"key": self._key(COORDINATOR)}))

    def _create(self, value: str, ttl: float) -> Holder | None:
        key, lease = self._key(COORDINATOR), _number_of(value)
        try:
            self._call("lease/grant", {"ID": lease, "TTL": str(math.ceil(ttl))})
        except StoreAccessError as error:
            if "already exists" not in str(error):
                raise
            self._call_on_lease("lease/keepalive", value)
        put = {"key": key, "value": _encode(self._seal.close(COORDINATOR, value)), "lease": lease}
        request = {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": put}, {"request_range": {"key": key}}],
            "failure": [{"request_range": {"key": key}}],
        }
        try:
            holder = self._parse(self._call("kv/txn", request)["responses"][-1]["response_range"])
        except _LeaseGoneError:
            return None
        return holder if holder is not None and holder.value == value else None

    def renew(self, held: Holder, ttl: float) -> bool:  # noqa: ARG002 - etcd keeps the time of the grant
        answer = self._call_on_lease("lease/keepalive", held.value)
        # The lease may live while the key is gone: somebody has deleted it.
        return int(answer.get("result", {}).get("TTL", 0)) > 0 and self.read() == held

    def release(self, held: Holder) -> None:
        self._call_on_lease("lease/revoke", held.value)

    def write_last(self, text: str) -> None:
        self._call("kv/put", {"key": self._key(LAST_ROUND), "value": _encode(self._seal.close(LAST_ROUND, text))})

    def _read_last(self) -> str:
        items = self._call("kv/range", {"key": self._key(LAST_ROUND)}).get("kvs", ())
        return _decode(items[0].get("value", "")) if items else ""

    def remove(self) -> None:
        for name in (COORDINATOR, LAST_ROUND):
            self._call("kv/deleterange", {"key": self._key(name)})

    def _parse(self, found: Document) -> Holder | None:
        items = found.get("kvs", ())
        if not items:
            return None
        value = self._seal.open(COORDINATOR, _decode(items[0].get("value", "")))
        return Holder(value, int(items[0]["create_revision"]))

    def _key(self, name: str) -> str:
        return _encode(f"{self._root}/{name}")

    # --- requests ----------------------------------------------------------------------------------------------------
    def _call_on_lease(self, path: str, value: str) -> Document:
        """Make a call about a holder's lease, which may be gone."""
        try:
            return self._call(path, {"ID": _number_of(value)})
        except _LeaseGoneError:
            return {}

    def _call(self, path: str, request: Document) -> Document:
        """Make one call; `_LeaseGoneError` if its lease is unknown."""
        return self._servers.ask("POST", f"/v3/{path}", json.dumps(request).encode(), {}, _read_answer)


def _read_answer(answer: Answer) -> Document:
    """Return the document of an answer."""
    try:
        # A call that streams answers with lines; of those that we use the first is all.
        document = json.loads(answer.body.split(b"\n", 1)[0] or b"{}")
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        text = answer.body[:200].decode(errors="replace").strip()
        if answer.status in _REFUSED:
            # Seen where users are on and our certificate has a CommonName: the gateway won't take such a one.
            message = f"etcd at {answer.endpoint} refuses us: {text}"
            raise StoreAccessError(message)
        if answer.status >= _SERVER_ERROR:
            message = f"etcd at {answer.endpoint}: {text}"
            raise StoreConnectionError(message, UNREADY)
        message = f"{answer.endpoint} does not speak etcd's version 3 API"
        raise StoreConnectionError(message, FOREIGN)
    if answer.status == _OK and "error" not in document:
        return document
    inner = document.get("error")
    fault: Document = inner if isinstance(inner, dict) else document
    code, text = fault.get("code", fault.get("grpc_code")), str(fault.get("message") or fault.get("error"))
    if code == _NOT_FOUND and "lease" in text:
        raise _LeaseGoneError(text)
    message = f"etcd at {answer.endpoint}: {text}"
    if answer.status >= _SERVER_ERROR or code in _NOT_NOW or "timed out" in text or "leader" in text:
        # The gateway says "request timed out" with HTTP's 500, so that is no refusal.
        raise StoreConnectionError(message, UNREADY)
    raise StoreAccessError(message)


def _number_of(value: str) -> str:
    """Return the number of a holder's lease: each value has a nonce."""
    return str(int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") >> 1 | 1)


def _encode(text: str) -> str:
    """Return a text as the gateway wants it."""
    return b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return b64decode(text).decode(errors="replace")
