"""The job store over etcd's version 2 API: single keys, and times to live. Reads are in `jobstore.etcd`.

Rules
- An entry of a stream is a key that etcd names in order.
- A node's heartbeat is a key with a time to live. The next heartbeat renews it if it is there; etcd removes it at the
  end of that time.
- The job's directory has a time to live too, which every node renews now and then: what a job that was killed left
  behind is gone after a day. Who writes makes it first, unless it has seen that something is in it.
- python-etcd's exceptions say that a call came too late, or too early (`_LATE`).
- There are no transactions: a request for each key. Where that matters, `etcd-v3` is the better choice.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import math
import time

import etcd

from elastic_run.store.errors import StoreError
from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.compression import compress, decompress
from elastic_run.store.jobstore.etcd import EtcdJobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client, decode_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Seconds between renewals of the job's directory.
_RENEW_JOB = LEFT_BEHIND / 24
_LATE = (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed, etcd.EtcdNotFile, etcd.EtcdAlreadyExist, etcd.EtcdDirNotEmpty)


class EtcdV2JobStore(EtcdJobStore):
    """A job's part of an etcd cluster.

    Args:
        api: The cluster; this object owns it from now on.
        run_id: The job.
        lease: Seconds after which etcd forgets the heartbeat of a silent node; etcd takes whole seconds.
        prefix: What comes before `elastic-run/`.
        has_job: Whether the job's directory is known to be there.

    Raises:
        StoreConnectionError: No server is able to answer.
        StoreAccessError: etcd refuses us.
    """

    keys_at_once = 4  # a request for each

    def __init__(
        self, api: EtcdV2Client, run_id: str, *, lease: float, prefix: str = "", has_job: bool = False
    ) -> None:
        super().__init__(api, run_id, lease, prefix.lstrip("/"))
        self._api = api
        self._job_renewed_at = time.monotonic()
        self._has_job = has_job
        try:
            api.http.connect()
        except StoreError:
            self.close()
            raise

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        with self._closes_on_loss():
            self._make_job()
            self._api.write(self._stream(stream), compress(value), append=True)

    def trim(self, stream: str, position: int) -> None:
        with self._closes_on_loss():
            items = self._api.read_directory(self._stream(stream)).items
            self._delete([item.key for item in items if item.created <= position])

    # --- keys ----------------------------------------------------------------------------------------------------
    def create(self, key: str, value: bytes) -> bytes:
        path = self._key(key)
        with self._closes_on_loss():
            self._make_job()
            while True:
                if _try(self._api.write, path, compress(value), prevExist=False):
                    return value
                there = self._look([path])[0]
                if there is not None:
                    return there

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        path = self._key(key)
        with self._closes_on_loss():
            self._make_job()
            there, index = self._read(path)
            if there != expected:
                return there
            guard = {"prevExist": False} if there is None else {"prevIndex": index}
            return value if _try(self._api.write, path, compress(value), **guard) else self._read(path)[0]

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._closes_on_loss():
            self._make_job()
            for key, value in values.items():
                self._api.write(self._key(key), compress(value))

    def delete(self, keys: Sequence[str]) -> None:
        with self._closes_on_loss():
            self._delete([self._key(key) for key in keys])

    def delete_where(self, keys: Sequence[str], expected: Mapping[str, bytes]) -> None:
        with self._closes_on_loss():
            there = {key: self._read(self._key(key)) for key in expected}
            if [value for value, _ in there.values()] == [*expected.values()]:
                for key in keys:
                    guard = {"prevIndex": there[key][1]} if key in there else {}
                    _try(self._api.delete, self._key(key), **guard)

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        ttl = math.ceil(self._lease)
        with self._closes_on_loss():
            self._make_job()
            self._renew_job()
            if last is not None:
                return _try(self._api.write, self._heartbeat(node), None, ttl=ttl, refresh=True, prevExist=True)
            self._api.write(self._heartbeat(node), compress(value), ttl=ttl)
            return True

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        paths = [self._heartbeat(node) for node in nodes]
        with self._closes_on_loss():
            there = {item.key for item in self._api.read_directory(self._heartbeat("")).items}
            self._delete([path for path in paths if path in there])

    def _make_job(self) -> None:
        if not self._has_job:
            _try(self._api.write, self._root, None, dir=True, ttl=LEFT_BEHIND, prevExist=False)
            self._has_job = True

    def _renew_job(self) -> None:
        now = time.monotonic()
        if now - self._job_renewed_at >= _RENEW_JOB:
            self._job_renewed_at = now
            _try(self._api.write, self._root, None, dir=True, ttl=LEFT_BEHIND, prevExist=True)

    # --- the whole -----------------------------------------------------------------------------------------------
    def remove_job(self) -> None:
        with self._closes_on_loss():
            self._has_job = False
            _try(self._api.delete, self._root, recursive=True)
            # What held the jobs, if this was the last.
            _try(self._api.delete, self._root.rstrip("/").rpartition("/")[0], dir=True)

    def clone(self) -> EtcdV2JobStore:
        return EtcdV2JobStore(
            self._api.clone(), self.run_id, lease=self._lease, prefix=self._prefix, has_job=self._has_job
        )

    # --- requests ------------------------------------------------------------------------------------------------
    def _look(self, paths: Sequence[str]) -> list[bytes | None]:
        return [self._read(path)[0] for path in paths]

    def _read(self, path: str) -> tuple[bytes | None, int]:
        """Return a key's value, None if it isn't there, and etcd's number of its last change."""
        try:
            found = self._api.read(path)
        except etcd.EtcdKeyNotFound:
            return None, 0
        self._has_job = True
        return decompress(decode_value(found.value or "")), found.modifiedIndex

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            _try(self._api.delete, path)


def _try(call: Callable[..., None], path: str, *values: bytes | None, **options: object) -> bool:
    """Make a call that etcd may refuse for the state of the key; return whether etcd accepted it."""
    try:
        call(path, *values, **options)
    except _LATE:
        return False
    return True
