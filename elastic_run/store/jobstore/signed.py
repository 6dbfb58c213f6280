"""A job store whose values are signed by the members of the job: what a stranger wrote is refused.

Rules
- Every value carries an HMAC-SHA256, under the job's secret, over the run id, the kind and name of where it lies, and
  the value. So a value that was copied to another key, stream, node or job is as good as garbage.
- A stream's garbage is left out, and what lies at a key is as good as missing; each place is reported once. Only who
  must know that a place is taken is told so: `create` and `wait` raise `StoreForgedError`, and a log's reader passes
  over that slot.
- Values are signed, not hidden: a program that can read the store can read them. And a stranger can still delete.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import hashlib
import hmac
import logging

from elastic_run.store.errors import StoreForgedError
from elastic_run.store.jobstore.api import JobStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

#: Places whose garbage was reported and is not reported again: a job may run for months.
_REMEMBERED = 256
_SIZE = hashlib.sha256().digest_size
_ENTRY, _KEY, _HEARTBEAT = b"entry", b"key", b"heartbeat"


class SignedStore(JobStore):
    """Signs what goes into a store, and checks what comes out.

    Args:
        store: The store; this object owns it from now on.
        secret: The secret that only the members of the job know.
        reported: Places whose garbage was reported over another connection.
    """

    def __init__(self, store: JobStore, secret: bytes, reported: dict[str, None] | None = None) -> None:
        self.run_id = store.run_id
        self.name = store.name
        self.expires_heartbeats = store.expires_heartbeats
        self.is_shared = store.is_shared
        self._store = store
        self._secret = secret
        # In order, the latest last. Shared by clones: a line for each place, not for each thread.
        self._reported: dict[str, None] = {} if reported is None else reported

    @property
    def restores(self) -> int:
        return self._store.restores

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        self._store.append(stream, self._add_signature(_ENTRY, stream, value))

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        entries, position = self._store.read(stream, position, timeout)
        opened = [self._remove_signature(_ENTRY, stream, entry) for entry in entries]
        return [entry for entry in opened if entry is not None], position

    def trim(self, stream: str, position: int) -> None:
        self._store.trim(stream, position)

    # --- keys ----------------------------------------------------------------------------------------------------
    def create(self, key: str, value: bytes) -> bytes:
        return self._read_surely(key, self._store.create(key, self._add_signature(_KEY, key, value)))

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        signed = None if expected is None else self._add_signature(_KEY, key, expected)
        there = self._store.replace(key, signed, self._add_signature(_KEY, key, value))
        return None if there is None else self._read_surely(key, there)

    def create_beside(self, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        there, beside = self._store.create_beside(key, self._add_signature(_KEY, key, value), other)
        return self._read_surely(key, there), None if beside is None else self._remove_signature(_KEY, other, beside)

    def wait(self, key: str, timeout: float) -> bytes | None:
        there = self._store.wait(key, timeout)
        return None if there is None else self._read_surely(key, there)

    def wait_beside(self, key: str, other: str, timeout: float) -> tuple[bytes | None, bytes | None]:
        there, beside = self._store.wait_beside(key, other, timeout)
        opened = None if beside is None else self._remove_signature(_KEY, other, beside)
        return None if there is None else self._read_surely(key, there), opened

    def is_forged(self, key: str) -> bool:
        return _name(_KEY, key) in self._reported

    def follow(self, key: str) -> bytes | None:
        there = self._store.follow(key)
        return None if there is None else self._remove_signature(_KEY, key, there)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        there = zip(keys, self._store.get(keys), strict=True)
        return [None if signed is None else self._remove_signature(_KEY, key, signed) for key, signed in there]

    def write(self, values: Mapping[str, bytes]) -> None:
        self._store.write({key: self._add_signature(_KEY, key, value) for key, value in values.items()})

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def delete_where(self, keys: Sequence[str], expected: Mapping[str, bytes]) -> None:
        self._store.delete_where(keys, {key: self._add_signature(_KEY, key, value) for key, value in expected.items()})

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        signed = None if last is None else self._add_signature(_HEARTBEAT, node, last)
        return self._store.write_heartbeat(node, self._add_signature(_HEARTBEAT, node, value), signed)

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        there = zip(nodes, self._store.fetch_heartbeats(nodes), strict=True)
        return [None if signed is None else self._remove_signature(_HEARTBEAT, node, signed) for node, signed in there]

    @property
    def reads_beside(self) -> bool:
        return self._store.reads_beside

    def fetch_heartbeats_beside(self, nodes: Sequence[str], other: str) -> tuple[list[bytes | None], bytes | None]:
        heartbeats, beside = self._store.fetch_heartbeats_beside(nodes, other)
        there = zip(nodes, heartbeats, strict=True)
        opened = [
            None if signed is None else self._remove_signature(_HEARTBEAT, node, signed) for node, signed in there
        ]
        return opened, None if beside is None else self._remove_signature(_KEY, other, beside)

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        self._store.forget_heartbeats(nodes)

    # --- the whole -----------------------------------------------------------------------------------------------
    def remove_job(self) -> None:
        self._store.remove_job()

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._secret, self._reported)

    def share(self) -> SignedStore:
        return SignedStore(self._store.share(), self._secret, self._reported)

    def set_timeout(self, timeout: float) -> None:
        self._store.set_timeout(timeout)

    def close(self) -> None:
        self._store.close()

    # --- signatures ----------------------------------------------------------------------------------------------
    def _add_signature(self, kind: bytes, place: str, value: bytes) -> bytes:
        return self._sign(kind, place, value) + value

    def _remove_signature(self, kind: bytes, place: str, signed: bytes) -> bytes | None:
        """Return a value, or None if no member of the job wrote it there."""
        value = signed[_SIZE:]
        if hmac.compare_digest(signed[:_SIZE], self._sign(kind, place, value)):
            return value
        name = _name(kind, place)
        if name not in self._reported:
            self._reported[name] = None
            for oldest in tuple(self._reported)[:-_REMEMBERED]:
                self._reported.pop(oldest, None)
            logger.warning("elastic-run: %s at %s was not written by a member of this job: left out", name, self.name)
        return None

    def _read_surely(self, key: str, signed: bytes) -> bytes:
        value = self._remove_signature(_KEY, key, signed)
        if value is None:
            message = f"key {key} at {self.name} was not written by a member of this job"
            raise StoreForgedError(message)
        return value

    def _sign(self, kind: bytes, place: str, value: bytes) -> bytes:
        signing = hmac.new(self._secret, digestmod=hashlib.sha256)
        # With their lengths: no two different lists of parts give the same bytes.
        for part in (self.run_id.encode(), kind, place.encode()):
            signing.update(b"%d:" % len(part) + part)
        signing.update(value)
        return signing.digest()


def _name(kind: bytes, place: str) -> str:
    return f"{kind.decode()} {place}"
