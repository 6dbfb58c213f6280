"""The lease over etcd's version 2, through python-etcd: a key with a time to live.

Rules
- python-etcd's client writes the requests and reads the answers, and its exceptions say what the key is or isn't. Ours
  (`EtcdServers`) carries them: python-etcd has no deadline for a whole request, knows the next server only by asking
  the cluster for names, which need not resolve here, and is of no use any more after all servers were away once.
- The term is the index at which the key was created. A renewal changes the time to live, and not this index.
- Each request names the value that it expects, with the holder's nonce: no late request touches another holder's key.
- Reads ask for a quorum: a member that is cut off would answer from the past.
"""

# ruff: noqa: D102 - LeaseStore says what the methods promise
from __future__ import annotations

import json
import math
from contextlib import suppress
from types import SimpleNamespace
from urllib.parse import quote, urlencode

import etcd

from elastic_run.rendezvous.coordination.etcd import EtcdLease
from elastic_run.rendezvous.coordination.lease import COORDINATOR, LAST_ROUND, Holder
from elastic_run.store.errors import FOREIGN, UNREADY, StoreAccessError, StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.rendezvous.coordination.etcd import Answer, EtcdServers

_SERVER_ERROR = 500
_UNAUTHORIZED = 110  # etcd's number
_LOST = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed)


class EtcdV2Lease(EtcdLease):
    """A job's lease as a key of etcd's version 2."""

    def __init__(self, servers: EtcdServers, run_id: str, **more: Any) -> None:
        super().__init__(servers, run_id, **more)
        self._root = quote(self._root.strip("/"))  # python-etcd quotes nothing
        self._etcd = _Client(servers)

    def read(self) -> Holder | None:
        try:
            found = self._call(self._etcd.read, COORDINATOR, quorum=True)
        except etcd.EtcdKeyNotFound:
            return None
        return Holder(self._seal.open(COORDINATOR, str(found.value)), found.createdIndex)

    def _create(self, value: str, ttl: float) -> Holder | None:
        stored = self._seal.close(COORDINATOR, value)
        try:
            made = self._call(self._etcd.write, COORDINATOR, stored, ttl=math.ceil(ttl), prevExist=False)
        except etcd.EtcdAlreadyExist:
            return None
        return Holder(value, made.createdIndex)

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

    def _read_last(self) -> str:
        try:
            return str(self._call(self._etcd.read, LAST_ROUND, quorum=True).value)
        except etcd.EtcdKeyNotFound:
            return ""

    def remove(self) -> None:
        for name, options in ((COORDINATOR, {}), (LAST_ROUND, {}), ("", {"dir": True}), ("..", {"dir": True})):
            # The directory that holds all jobs goes with the last of them.
            with suppress(etcd.EtcdKeyNotFound, etcd.EtcdDirNotEmpty):
                self._call(self._etcd.delete, name, **options)

    def _call(self, method: Callable[..., Any], name: str, *values: str | None, **options: object) -> Any:
        """Make one call of python-etcd's client about a key of the job; `..` is what holds the jobs."""
        key = self._root.rpartition("/")[0] if name == ".." else f"{self._root}/{name}".rstrip("/")
        return method(key, *values, **options)


class _Client(etcd.Client):  # type: ignore[misc] # python-etcd has no types
    """python-etcd's client over our connections."""

    def __init__(self, servers: EtcdServers) -> None:
        super().__init__()
        self._servers = servers

    def api_execute(self, path: str, method: str, params: Any = None, timeout: object = None) -> Any:  # noqa: ARG002
        fields = urlencode(params or {})
        is_body = method in (self._MPUT, self._MPOST)
        url, body = (path, fields) if is_body or not fields else (f"{path}?{fields}", "")
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._servers.ask(method, url, body.encode(), headers, _read_answer)


def _read_answer(answer: Answer) -> SimpleNamespace:
    """Return an answer as python-etcd reads it, or raise its exception."""
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        document = None
    fault = document if isinstance(document, dict) else {}
    text = f"{fault.get('message')} ({fault.get('cause')})" if "message" in fault else ""
    if answer.status >= _SERVER_ERROR:
        message = f"etcd at {answer.endpoint}: {text or answer.body[:200].decode(errors='replace').strip()}"
        raise StoreConnectionError(message, UNREADY)
    if "errorCode" in fault and fault["errorCode"] != _UNAUTHORIZED:
        etcd.EtcdError.handle(fault)
    if text:
        message = f"etcd at {answer.endpoint}: {text}"
        raise StoreAccessError(message)
    if "node" not in fault:
        remedy = "etcd 3.4 needs --enable-v2; etcd-v3 does not"
        message = f"{answer.endpoint} does not speak etcd's version 2 API ({remedy})"
        raise StoreConnectionError(message, FOREIGN)
    return SimpleNamespace(status=answer.status, data=answer.body, getheaders=lambda: answer.headers)
