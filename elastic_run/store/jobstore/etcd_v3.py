"""The job store over etcd's version 3 API: transactions and leases. Reads are in `jobstore.etcd`.

Rules
- An entry of a stream is a key with a name of its own, so a thousand nodes that append at once don't collide.
- A node's heartbeat is a key on a lease of the node. The next heartbeat renews the lease, and etcd removes the key when
  the lease expires. The coordinator knows the lease's number, too, and ends it when it drops the node.
- Everything else hangs on a lease of the job, which every node renews now and then: what a job that was killed left
  behind is gone after a day.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import hashlib
import math
import secrets
import time

from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.compression import compress, decompress
from elastic_run.store.jobstore.etcd import EtcdJobStore
from elastic_run.store.jobstore.etcd_v3_client import (
    LeaseGoneError,
    encode,
    encode_key,
    end_of,
    parse_items,
    range_request,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from elastic_run.store.jobstore.etcd import Item
    from elastic_run.store.jobstore.etcd_v3_client import Document, EtcdV3Client

    _T = TypeVar("_T")

#: Operations and bytes of one transaction: etcd takes 128 and 1.5 MB unless it was told otherwise.
_OPERATIONS = 128
_BYTES = 512 * 1024
#: Seconds between renewals of the job's lease.
_RENEW_JOB = LEFT_BEHIND / 24


class EtcdV3JobStore(EtcdJobStore):
    """A job's part of an etcd cluster.

    Args:
        api: The cluster; this object owns it from now on.
        run_id: The job.
        lease: Seconds after which etcd forgets the heartbeat of a silent node; etcd takes whole seconds, from two on.
        prefix: What comes before `elastic-run/`.

    Raises:
        StoreConnectionError: No server can be reached.
        StoreAccessError: etcd refuses us.
    """

    keys_at_once = _OPERATIONS  # one request for all

    def __init__(
        self,
        api: EtcdV3Client,
        run_id: str,
        *,
        lease: float,
        prefix: str = "",
    ) -> None:
        super().__init__(api, run_id, lease, prefix)
        self._api = api
        self._job_lease = _lease_of(self._root)
        self._job_renewed_at = time.monotonic()
        api.http.connect()

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        with self._closes_on_loss():
            put = self._put_request(f"{self._stream(stream)}{secrets.token_hex(8)}", value)["request_put"]
            self._with_job_lease(lambda: self._api.call("kv/put", put))

    def trim(self, stream: str, position: int) -> None:
        directory = self._stream(stream)
        with self._closes_on_loss():
            past = self._api.read(directory, end_of(directory), max_create_revision=str(position), keys_only=True)
            self._delete(item.key for item in past.items)

    # --- keys ----------------------------------------------------------------------------------------------------
    def create(self, key: str, value: bytes) -> bytes:
        return self._create(self._key(key), value, [])[0]

    def create_beside(self, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        there, beside = self._create(self._key(key), value, [{"request_range": range_request(self._key(other))}])
        return there, _decompressed(parse_items(beside[0]["response_range"]))

    def _create(self, path: str, value: bytes, beside: list[Document]) -> tuple[bytes, list[Document]]:
        """Create a key unless it is there; returns what is there, and the answers to what is asked beside it."""
        is_free: Document = {"key": encode_key(path), "target": "VERSION", "result": "EQUAL", "version": "0"}
        request: Document = {
            "compare": [is_free],
            "success": [self._put_request(path, value), *beside],
            "failure": [{"request_range": range_request(path)}, *beside],
        }
        with self._closes_on_loss():
            while True:
                answer = self._with_job_lease(lambda: self._api.call("kv/txn", request))
                responses = answer["responses"]
                if answer.get("succeeded"):
                    return value, responses[1:]
                there = _decompressed(parse_items(responses[0]["response_range"]))
                if there is not None:
                    return there, responses[1:]

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        path = self._key(key)
        with self._closes_on_loss():
            items = parse_items(self._api.call("kv/range", range_request(path)))
            there = _decompressed(items)
            if there != expected:
                return there
            request: Document = {"compare": [_is_same(path, items)], "success": [self._put_request(path, value)]}
            answer = self._with_job_lease(lambda: self._api.call("kv/txn", request))
            return value if answer.get("succeeded") else self._look([path])[0]

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._closes_on_loss():
            self._put({self._key(key): value for key, value in values.items()})

    def delete(self, keys: Sequence[str]) -> None:
        with self._closes_on_loss():
            self._delete(self._key(key) for key in keys)

    def delete_where(self, keys: Sequence[str], expected: Mapping[str, bytes]) -> None:
        # By value: a store that was restored counts on from an older number, so another value may have the same one.
        compare = [_has_value(self._key(key), value) for key, value in expected.items()]
        with self._closes_on_loss():
            for some in _batches([_removal(self._key(key)) for key in keys]):
                self._api.call("kv/txn", {"compare": compare, "success": some})

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        lease = _lease_of(self._heartbeat(node))
        with self._closes_on_loss():
            self._renew_job()
            if last is not None:
                return self._api.keep_alive(lease)
            self._api.grant(lease, math.ceil(self._lease))
            put = {"key": encode_key(self._heartbeat(node)), "value": encode(compress(value)), "lease": str(lease)}
            try:
                self._api.call("kv/put", put)
            except LeaseGoneError:
                return False
            return True

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        paths = [self._heartbeat(node) for node in nodes]
        directory = self._heartbeat("")
        with self._closes_on_loss():
            there = {item.key for item in self._api.read(directory, end_of(directory), keys_only=True).items}
            for path in paths:
                if path in there:
                    self._api.revoke(_lease_of(path))

    def _renew_job(self) -> None:
        now = time.monotonic()
        if now - self._job_renewed_at >= _RENEW_JOB:
            self._job_renewed_at = now
            self._api.keep_alive(self._job_lease)

    # --- the whole -----------------------------------------------------------------------------------------------
    def remove_job(self) -> None:
        with self._closes_on_loss():
            self._api.call("kv/deleterange", range_request(self._root, end_of(self._root)))
            self._api.revoke(self._job_lease)

    def clone(self) -> EtcdV3JobStore:
        return EtcdV3JobStore(self._api.clone(), self.run_id, lease=self._lease, prefix=self._prefix)

    # --- requests ------------------------------------------------------------------------------------------------
    def _look(self, paths: Sequence[str]) -> list[bytes | None]:
        if len(paths) == 1:  # most often it is one, and this costs etcd the least
            there = parse_items(self._api.call("kv/range", range_request(paths[0])))
            return [_decompressed(there)]
        values: list[bytes | None] = []
        for some in _batches([{"request_range": range_request(path)} for path in paths]):
            answers = self._api.call("kv/txn", {"success": some})["responses"]
            values += [_decompressed(parse_items(answer["response_range"])) for answer in answers]
        return values

    def _put(self, values: Mapping[str, bytes]) -> None:
        for some in _batches([self._put_request(path, value) for path, value in values.items()]):
            self._with_job_lease(lambda some=some: self._api.call("kv/txn", {"success": some}))  # type: ignore[misc]

    def _put_request(self, path: str, value: bytes) -> Document:
        return {
            "request_put": {"key": encode_key(path), "value": encode(compress(value)), "lease": str(self._job_lease)}
        }

    def _delete(self, paths: Iterable[str]) -> None:
        for some in _batches([_removal(path) for path in paths]):
            self._api.call("kv/txn", {"success": some})

    def _with_job_lease(self, ask: Callable[[], _T]) -> _T:
        """Ask what hangs keys on the job's lease, and make the lease where it isn't there."""
        try:
            return ask()
        except LeaseGoneError:
            self._api.grant(self._job_lease, LEFT_BEHIND)
            return ask()


def _lease_of(path: str) -> int:
    """Return the number of the lease that belongs to a key or a directory, the same for every node."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1 | 1


def _decompressed(items: list[Item]) -> bytes | None:
    stored = items[0].value if items else None
    return None if stored is None else decompress(stored)


def _is_same(path: str, items: list[Item]) -> Document:
    """Return the condition that a key has not changed since it was read."""
    number = str(items[0].changed) if items else "0"  # a key that isn't there has 0
    return {"key": encode_key(path), "target": "MOD", "result": "EQUAL", "mod_revision": number}


def _has_value(path: str, value: bytes) -> Document:
    return {"key": encode_key(path), "target": "VALUE", "result": "EQUAL", "value": encode(compress(value))}


def _removal(path: str) -> Document:
    return {"request_delete_range": range_request(path)}


def _batches(operations: list[Document]) -> Iterator[list[Document]]:
    """Cut operations into transactions that etcd takes."""
    batch: list[Document] = []
    size = 0
    for operation in operations:
        length = sum(len(str(field.get("value", ""))) for field in operation.values())
        if batch and (len(batch) == _OPERATIONS or size + length > _BYTES):
            yield batch
            batch, size = [], 0
        batch.append(operation)
        size += length
    if batch:
        yield batch
