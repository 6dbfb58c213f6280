"""The lease over etcd's version 2, through python-etcd: a key with a time to live.

Rules
- python-etcd makes the requests, and its exceptions say what the key is or isn't. Its pool of connections is ours
  (`_Pool`): python-etcd's has no deadline for a whole request, knows the next server only by asking the cluster for
  names, which need not resolve here, and is of no use any more after all servers were away once.
- The term is the index at which the key was created. A renewal changes the time to live, and not this index.
- Each request names the value that it expects, with the holder's nonce: no late request touches another holder's key.
- Reads ask for a quorum: a member that is cut off would answer from the past.
"""

# ruff: noqa: D102 - LeaseStore says what the methods promise
from __future__ import annotations

import json
import logging
import math
from base64 import b64encode
from contextlib import suppress
from urllib.parse import quote

import etcd

from elastic_run.rendezvous.leases.lease import COORDINATOR, LAST_ROUND, EtcdLease, Holder
from elastic_run.store.errors import FOREIGN, UNREADY, StoreAccessError, StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.rendezvous.leases.etcd_servers import Answer, EtcdServers, EtcdUser

_DONE = (200, 201)
_SERVER_ERROR = 500
_UNAUTHORIZED = 110  # etcd's number
#: What a request may meet: a holder that leaves. Each is met once, not again and again.
_ATTEMPTS = 4
_LOST = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed)


class EtcdV2Lease(EtcdLease):
    """A job's lease as a key of etcd's version 2; see `EtcdLease` for the values."""

    def __init__(
        self,
        servers: EtcdServers,
        run_id: str,
        *,
        prefix: str = "",
        user: EtcdUser | None = None,
        secret: bytes | None = None,
    ) -> None:
        super().__init__(servers, run_id, prefix=prefix, user=user, secret=secret)
        # python-etcd quotes nothing.
        self._root = quote(self._root.strip("/"))
        # It logs each failure as an error, before the next server is asked.
        logging.getLogger("etcd").setLevel(logging.CRITICAL)
        self._etcd = etcd.Client(allow_redirect=False)
        pool = _Pool(servers, user)
        self._etcd.http.pool_classes_by_scheme = {"http": lambda *_, **__: pool}

    def read(self) -> Holder | None:
        try:
            found = self._call(self._etcd.read, COORDINATOR, quorum=True)
        except etcd.EtcdKeyNotFound:
            return None
        return Holder(self._seal.open(COORDINATOR, str(found.value)), found.createdIndex)

    def acquire(self, value: str, ttl: float, *, instead_of: Holder | None = None) -> Holder | None:
        stored = self._seal.close(COORDINATOR, value)
        for _ in range(_ATTEMPTS):
            holder = self.read()
            if holder is None:
                with suppress(etcd.EtcdAlreadyExist):
                    made = self._call(self._etcd.write, COORDINATOR, stored, ttl=math.ceil(ttl), prevExist=False)
                    return Holder(value, made.createdIndex)
            elif holder.value == value:
                if self.renew(holder, ttl):
                    return holder  # of an earlier attempt, whose answer was lost: its time to live has run since then
            elif holder == instead_of:
                self.release(holder)
            else:
                break
        return None

    def renew(self, held: Holder, ttl: float) -> bool:
        stored = self._seal.close(COORDINATOR, held.value)
        options = {"ttl": math.ceil(ttl), "refresh": True, "prevExist": True, "prevValue": stored}
        try:
            created: int = self._call(self._etcd.write, COORDINATOR, None, **options).createdIndex
        except _LOST:
            return False
        return created == held.term

    def release(self, held: Holder) -> None:
        with suppress(*_LOST):
            self._call(self._etcd.delete, COORDINATOR, prevValue=self._seal.close(COORDINATOR, held.value))

    def write_last(self, text: str) -> None:
        self._call(self._etcd.write, LAST_ROUND, self._seal.close(LAST_ROUND, text))

    def read_last(self) -> str:
        try:
            return self._open_last(str(self._call(self._etcd.read, LAST_ROUND, quorum=True).value))
        except etcd.EtcdKeyNotFound:
            return ""

    def remove(self) -> None:
        for name, options in ((COORDINATOR, {}), (LAST_ROUND, {}), ("", {"dir": True}), ("..", {"dir": True})):
            # The directory that holds all jobs goes with the last of them.
            with suppress(etcd.EtcdKeyNotFound, etcd.EtcdDirNotEmpty):
                self._call(self._etcd.delete, name, **options)

    def _call(self, method: Callable[..., Any], name: str, *values: str | None, **options: object) -> Any:
        """Make one call of python-etcd's client about a key of the job; `..` is what holds the jobs.

        Returns:
            Its answer, an `etcd.EtcdResult`.

        Raises:
            StoreConnectionError: No server is able to answer within the timeout.
            StoreAccessError: etcd refuses this node.
            etcd.EtcdException: etcd refuses the operation for what the key is or isn't.
        """
        key = self._root.rpartition("/")[0] if name == ".." else f"{self._root}/{name}".rstrip("/")
        self._etcd.expected_cluster_id = None  # behind one address there may be another cluster now
        try:
            return method(key, *values, **options)
        except etcd.EtcdConnectionFailed as error:
            raise error.cause from None
        except etcd.EtcdException as error:
            if isinstance(error.payload, dict) and "errorCode" in error.payload:
                raise
            raise _say_foreign(str(self._servers)) from error


class _Pool:
    """Takes python-etcd's requests to a cluster.

    Args:
        servers: The cluster.
        user: The user, if etcd wants to know. python-etcd takes letters of Latin-1 only.
    """

    def __init__(self, servers: EtcdServers, user: EtcdUser | None) -> None:
        self._servers = servers
        text = "" if user is None else f"{user.name}:{user.password}"
        self._headers = {"Authorization": f"Basic {b64encode(text.encode()).decode()}"} if text else {}

    def urlopen(self, method: str, url: str, *, headers: Mapping[str, str], body: str = "", **_: object) -> _Response:
        """Send a request of python-etcd."""
        return self._servers.ask(method, url, body.encode(), {**headers, **self._headers}, _read_answer)


def _read_answer(answer: Answer) -> _Response:
    """Return an answer that python-etcd understands."""
    try:
        fault = json.loads(answer.body)
    except (ValueError, RecursionError):
        fault = None
    text = f"{fault.get('message')} ({fault.get('cause')})" if isinstance(fault, dict) else ""
    if answer.status in _DONE and text:
        return _Response(answer)
    if answer.status >= _SERVER_ERROR:
        message = f"etcd at {answer.endpoint}: {text or answer.body[:200].decode(errors='replace').strip()}"
        raise StoreConnectionError(message, UNREADY)
    if not text:
        raise _say_foreign(answer.endpoint)
    code = fault.get("errorCode")
    if not isinstance(code, int) or code == _UNAUTHORIZED:
        message = f"etcd at {answer.endpoint}: {text}"
        raise StoreAccessError(message)
    return _Response(answer)


def _say_foreign(endpoint: str) -> StoreConnectionError:
    what = "does not speak etcd's version 2 API (etcd 3.4 needs --enable-v2; etcd-v3 does not)"
    return StoreConnectionError(f"{endpoint} {what}", FOREIGN)


class _Response:
    """An answer, as python-etcd reads it."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.data = answer.body
        self._headers = answer.headers

    def getheaders(self) -> Mapping[str, str]:
        return self._headers

    def getheader(self, name: str) -> str | None:
        return self._headers.get(name)
