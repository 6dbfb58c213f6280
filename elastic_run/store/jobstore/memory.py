"""A job store in this process's memory: for tests, and the model that the others are held against.

A `JobSpace` is the store, `MemoryJobStore` an agent's connection to it. The space can be made unreachable, so that what
an agent does in an outage can be tried without a network.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import threading
from bisect import bisect_right

from elastic_run.store.errors import SILENT, StoreConnectionError
from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE, JobStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class JobSpace:
    """What several connections share.

    Attributes:
        is_reachable: Whether operations work; set it with `set_reachable`.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.heartbeats: dict[str, bytes] = {}
        # By stream: positions and entries, side by side, oldest first.
        self.streams: dict[str, tuple[list[int], list[bytes]]] = {}
        self.newest = 0

    def set_reachable(self, *, is_reachable: bool) -> None:
        """Begin or end an outage: operations raise, those that wait too."""
        with self.changed:
            self.is_reachable = is_reachable
            self.changed.notify_all()


class MemoryJobStore(JobStore):
    """A connection to a space.

    Args:
        space: What to share with other connections; a space of its own if None.
        run_id: The job, for messages: a space holds one job.
    """

    name = "memory"

    def __init__(self, space: JobSpace | None = None, run_id: str = "job") -> None:
        self.run_id = run_id
        self.space = JobSpace() if space is None else space
        self._is_closed = False
        with self.space.changed:
            self._check()

    def append(self, stream: str, value: bytes) -> None:
        with self.space.changed:
            self._check()
            self.space.newest += 1
            positions, entries = self.space.streams.setdefault(stream, ([], []))
            positions.append(self.space.newest)
            entries.append(value)
            self.space.changed.notify_all()

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        def is_there() -> bool:
            positions, _ = self.space.streams.get(stream, ([], []))
            return bool(positions) and positions[-1] > position

        with self.space.changed:
            if not self._wait_until(is_there, timeout):
                return [], position
            positions, entries = self.space.streams[stream]
            first = bisect_right(positions, position)
            taken = entries[first : first + ENTRIES_AT_ONCE]
            return taken, positions[first + len(taken) - 1]

    def trim(self, stream: str, position: int) -> None:
        with self.space.changed:
            self._check()
            positions, entries = self.space.streams.get(stream, ([], []))
            behind = bisect_right(positions, position)
            del positions[:behind]
            del entries[:behind]

    def create(self, key: str, value: bytes) -> bytes:
        with self.space.changed:
            self._check()
            there = self.space.values.setdefault(key, value)
            self.space.changed.notify_all()
            return there

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self.space.changed:
            self._check()
            if self.space.values.get(key) == expected:
                self.space.values[key] = value
                self.space.changed.notify_all()
            return self.space.values.get(key)

    def wait(self, key: str, timeout: float) -> bytes | None:
        with self.space.changed:
            self._wait_until(lambda: key in self.space.values, timeout)
            return self.space.values.get(key)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self.space.changed:
            self._check()
            return [self.space.values.get(key) for key in keys]

    def write(self, values: Mapping[str, bytes]) -> None:
        with self.space.changed:
            self._check()
            self.space.values.update(values)
            self.space.changed.notify_all()

    def delete(self, keys: Sequence[str]) -> None:
        with self.space.changed:
            self._check()
            for key in keys:
                self.space.values.pop(key, None)

    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        with self.space.changed:
            self._check()
            if last is not None and self.space.heartbeats.get(node) != last:
                return False
            self.space.heartbeats[node] = value
            return True

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        with self.space.changed:
            self._check()
            return [self.space.heartbeats.get(node) for node in nodes]

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        with self.space.changed:
            self._check()
            for node in nodes:
                self.space.heartbeats.pop(node, None)

    def remove_job(self) -> None:
        with self.space.changed:
            self._check()
            self.space.values.clear()
            self.space.heartbeats.clear()
            self.space.streams.clear()

    def clone(self) -> MemoryJobStore:
        return MemoryJobStore(self.space, self.run_id)

    def close(self) -> None:
        with self.space.changed:
            self._is_closed = True
            self.space.changed.notify_all()

    def _wait_until(self, is_there: Callable[[], bool], timeout: float) -> bool:
        """Wait with the space held; returns whether the condition came true."""
        self.space.changed.wait_for(lambda: self._is_closed or not self.space.is_reachable or is_there(), timeout)
        self._check()
        return is_there()

    def _check(self) -> None:
        if self._is_closed:
            message = "the connection to the store in memory is closed"
            raise StoreConnectionError(message)
        if not self.space.is_reachable:
            self._is_closed = True
            message = "the store in memory does not answer"
            raise StoreConnectionError(message, SILENT)
