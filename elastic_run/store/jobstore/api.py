"""What the agents of one job share: a job store. One small set of operations, and a backend for each kind of store.

Rules
- All of it lies below `elastic-run/<run id>/`, so two jobs never mix. Names of keys and streams are ours: ASCII, path
  segments joined with `/`, none of them empty, `.` or `..`. Values are bytes and never empty.
- A stream is a list of entries in one order that all readers see alike. `append` may put the same entry twice when a
  reply was lost; it never loses one that it returned from.
- A key is made once (`create`: the first wins, and all see the same winner), written over (`write`: the last wins) or
  changed from one known value to another (`replace`).
- An object belongs to one thread. Only `close` and `share` may be called from another one; `close` wakes the thread
  that waits in it.
- When the store can't be reached, or broke the connection, the operation raises `StoreConnectionError` and the object
  is closed. Whether the operation took place is then unknown. `clone` works on a closed object too: it opens a new one.
- A store that refuses us for good (user, password, certificate, right) raises `StoreAccessError` from any operation.
  Values that strangers wrote come out as they are, unless the store is signed (`signed`): who reads must check them.
- A heartbeat is a number that changes as long as its node lives. `None` says that the store has none: it never came,
  was removed with the node, or the store itself has let it expire (`expires_heartbeats`). A heartbeat replaces the one
  before it and no other, so a node whose heartbeat was removed learns from its next one that the job goes on without
  it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self  # for the type checker only: typing has it from Python 3.11 on

#: Seconds for which a store keeps what a job left behind without being able to remove it, where it can do that.
LEFT_BEHIND = 24 * 3600
#: Entries that one `read` returns at most.
ENTRIES_AT_ONCE = 1024

_COUNT_DIGITS = 20


class JobStore(ABC):
    """One job's part of a store, over a connection of its own.

    Attributes:
        run_id: The job.
        name: The store for messages, such as `10.0.0.1:29400`.
        expires_heartbeats: Whether the store itself forgets the heartbeat of a silent node after its lease.
        is_shared: Whether this object uses the connection of another one.
    """

    run_id: str
    name: str
    expires_heartbeats = False
    is_shared = False
    # Number of heartbeats that this object has read: in a store that expires them, each that is there counts as new.
    _reads = 0

    @property
    def restores(self) -> int:
        """How often this agent saw the store go back to an earlier state; positions of before mean nothing then."""
        return 0

    @property
    def reads_beside(self) -> bool:
        """Whether `read_heartbeats_beside` costs no more than `read_heartbeats`."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- streams -------------------------------------------------------------------------------------------------
    @abstractmethod
    def append(self, stream: str, value: bytes) -> None:
        """Put an entry at a stream's end."""

    @abstractmethod
    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        """Wait for entries behind a position, and return those that are there.

        Args:
            stream: The stream.
            position: 0 for the beginning, else what an earlier `read` returned, in whatever process. What was trimmed
                is passed over.
            timeout: Seconds to wait for the first entry; 0 to look without waiting.

        Returns:
            The entries in their order, `ENTRIES_AT_ONCE` at most, and the position behind the last of them; none and a
            position that is as good as the one given when nothing came in time.
        """

    @abstractmethod
    def trim(self, stream: str, position: int) -> None:
        """Forget a stream's entries up to a position that a `read` returned."""

    # --- keys ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def create(self, key: str, value: bytes) -> bytes:
        """Give a key a value if it has none.

        Args:
            key: The key.
            value: The value; two writers' values for one key must differ. Repeating this with the same value is
                harmless.

        Returns:
            The value that is there now: ours if it equals `value`.
        """

    @abstractmethod
    def wait(self, key: str, timeout: float) -> bytes | None:
        """Wait until a key is there.

        Args:
            key: The key.
            timeout: Seconds; 0 to look without waiting.

        Returns:
            Its value, or None when it did not appear in time.
        """

    @abstractmethod
    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Give a key another value if it has the expected one.

        Args:
            key: The key.
            expected: The value it must have; None if it must not be there.
            value: The new value.

        Returns:
            The value that is there now, None if there is none: `value` if it was replaced.
        """

    # --- two keys at once ----------------------------------------------------------------------------------------
    def create_beside(self, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        """Do `create`, and read another key after it.

        Args:
            key: The key to make.
            value: Its value.
            other: The key to read, in the same directory.

        Returns:
            What `create` returns, and the other key's value at that moment or later, or None.
        """
        return self.create(key, value), self.get([other])[0]

    def wait_beside(self, key: str, other: str, timeout: float) -> tuple[bytes | None, bytes | None]:
        """Do `wait`, and read another key after it.

        Args:
            key: The key to wait for.
            other: The key to read, in the same directory.
            timeout: Seconds; 0 to look without waiting.

        Returns:
            What `wait` returns, and the other key's value at that moment or later, or None.
        """
        return self.wait(key, timeout), self.get([other])[0]

    def is_forged(self, key: str) -> bool:
        """Tell whether this object has read a value of the key that no member of the job has written."""
        del key
        return False

    def follow(self, key: str) -> bytes | None:
        """Return the value of a key, None if it is not there, and get ready to `wait` for others of its directory.

        Where such a wait begins with reading the directory, that is done here: the first wait may return what was there
        then, and costs nothing.
        """
        return self.get([key])[0]

    @abstractmethod
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, None for those that are not there."""

    @abstractmethod
    def write(self, values: Mapping[str, bytes]) -> None:
        """Give keys their values, whatever they had before.

        When it returns all of them are there; when it raises, any part of them may be.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; those that are not there don't matter."""

    def delete_where(self, keys: Sequence[str], expected: Mapping[str, bytes]) -> None:
        """Remove keys if some keys have the expected values.

        On etcd v3, which can be restored from a backup meanwhile, this is one step. On etcd v2 a key that is among the
        expected ones is removed only as long as nobody writes it.
        """
        if self.get([*expected]) == [*expected.values()]:
            self.delete(keys)

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def heartbeat(self, node: str, last: int | None = None) -> int | None:
        """Show that a node lives. Where the store expires heartbeats this must come more often than the lease.

        Args:
            node: The node.
            last: What this returned for the node's last heartbeat, over whatever connection; None to begin anew.

        Returns:
            What to give for the next heartbeat. None if the last one is no longer there, and then nothing was written:
            the coordinator has dropped the node, or it has expired, or the reply to an earlier heartbeat was lost.
        """
        # It grows also on a clock that stands still, and where the connection is made anew.
        count = max(time.monotonic_ns() // 1_000_000, 0 if last is None else last + 1)
        return count if self.write_heartbeat(node, _count(count), None if last is None else _count(last)) else None

    def read_heartbeats(self, nodes: Sequence[str]) -> list[int | None]:
        """Return a number for each node, another one if it has beaten since the last read, or None if there is none."""
        return self._parse_heartbeats(self.fetch_heartbeats(nodes))

    def _parse_heartbeats(self, values: Sequence[bytes | None]) -> list[int | None]:
        if self.expires_heartbeats:
            self._reads += 1
            return [None if value is None else self._reads for value in values]
        return [_parse_count(value) for value in values]

    def read_heartbeats_beside(self, nodes: Sequence[str], other: str) -> tuple[list[int | None], bytes | None]:
        """Do `read_heartbeats`, and read a key with it, in one exchange where `reads_beside` says so."""
        values, beside = self.fetch_heartbeats_beside(nodes, other)
        return self._parse_heartbeats(values), beside

    @abstractmethod
    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        """Remove the heartbeats of nodes that are gone. One that lives all the same learns it from its next one."""

    @abstractmethod
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        """Store a node's heartbeat in place of `last`, or of any where that is None; `heartbeat` is what to call.

        Returns:
            Whether it was stored; False where `last` was not there any more.
        """

    @abstractmethod
    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        """Return what `write_heartbeat` has stored; `read_heartbeats` is what to call."""

    def fetch_heartbeats_beside(self, nodes: Sequence[str], other: str) -> tuple[list[bytes | None], bytes | None]:
        """Do `fetch_heartbeats`, and read a key; `read_heartbeats_beside` is what to call."""
        return self.fetch_heartbeats(nodes), self.get([other])[0]

    # --- the whole -----------------------------------------------------------------------------------------------
    @abstractmethod
    def remove_job(self) -> None:
        """Remove everything of this job from the store. Nodes that still use it see an empty store."""

    @abstractmethod
    def clone(self) -> JobStore:
        """Open another connection to the same job, for another thread or in place of a broken one.

        Raises:
            StoreConnectionError: The store can't be reached within the timeout that this object was made with.
        """

    def share(self) -> JobStore:
        """Return an object for another thread, over this connection if two threads can use it, else like `clone`.

        Over a shared connection one of both threads waits, with `wait` or `wait_beside`, and the operations of the
        other one pass, which waits for nothing meanwhile. `close` of this object ends both; `close` of the object that
        shares leaves this one as it is, and wakes no thread.
        """
        return self.clone()

    def set_timeout(self, timeout: float) -> None:  # noqa: B027 - a store without answers that are late needs none
        """Give each answer so many seconds from now on."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, from any thread; an operation that waits raises `StoreConnectionError` at once."""


def _count(value: int) -> bytes:
    return b"%0*d" % (_COUNT_DIGITS, value)  # all of one length: a file's heartbeats are written in place


def _parse_count(value: bytes | None) -> int | None:
    if value is None or not value.isdigit() or len(value) > _COUNT_DIGITS:
        return None  # not ours: as good as none
    return int(value)
