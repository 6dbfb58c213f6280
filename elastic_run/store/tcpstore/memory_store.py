"""A store in memory: values, counters, queues, and the clients that wait for them. No I/O, no clock, no thread.

Rules
- Keys and values are bytes, as on the wire. The operations have the names and the semantics of torch's Store, whose
  odd corners are listed in `wire`.
- Nothing blocks. `on_key` and `barrier` return a `Waiter` that is called back, once, from within the operation that
  ends the wait. Whoever loses interest cancels it.
- What is kept has a bound, `limit`; what would pass it raises `LimitError` and changes nothing. A value that was
  replaced or deleted counts on while somebody else holds it: a reply that its client doesn't read.
- A value that grows by `append` is kept in pieces, so that neither growing nor reading it copies the whole.
- A push to a queue wakes one waiter, the first, since there is one thing to have. When that one turns away without it
  (its own deadline passed just then, or it died), `pass_on` wakes the next: torch's server leaves it asleep.
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount

from elastic_run.store.errors import LimitError
from elastic_run.store.limits import ENTRY_COST, QUEUE_COST, UNBOUNDED
from elastic_run.store.tcpstore.integers import parse_integer
from elastic_run.store.tcpstore.waits import Waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_run.store.tcpstore.waits import Waiter

_MODULUS = 1 << 64
_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
#: Bytes of a value above which a reply refers to it, where smaller ones are copied.
SHARED_FROM = 2048
#: Bytes of a piece to which `append` still adds.
_PIECE = 16 * 1024
#: Bytes of released values over which they are looked through.
_SWEEP_FROM = 1024 * 1024


class Pieces:
    """A value that has grown, in its pieces."""

    __slots__ = ("parts", "size")

    def __init__(self, first: bytes) -> None:
        self.parts = [first]
        self.size = len(first)

    def __len__(self) -> int:
        return self.size

    def append(self, value: bytes) -> None:
        """Put bytes behind it."""
        self.size += len(value)
        last = self.parts.pop()
        # A piece that a reply refers to stays as it is: a grown copy would be held beside it, and not be counted.
        if len(last) + len(value) <= _PIECE and (len(last) <= SHARED_FROM or getrefcount(last) <= _OWN_REFERENCES):
            self.parts.append(last + value)
        else:
            self.parts += (last, value)


class MemoryStore:
    """Keys with values, queues, and waiters.

    Attributes:
        limit: Bytes that the keys and values may take; change it with `set_limit`.
        size: Bytes that the keys and values take, those included that are only in replies any more.
    """

    def __init__(self) -> None:
        self.limit = UNBOUNDED
        self.size = 0
        # Values that are not in the store any more, but were in a reply when they left it.
        self._released: list[bytes] = []
        self._released_size = 0
        self._sweep_at = _SWEEP_FROM
        self._values: dict[bytes, bytes | Pieces] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waits = Waits()

    def set_limit(self, limit: int) -> None:
        """Bound what keys and values take together, and, apart from that, what waiting clients take."""
        self.limit = self._waits.limit = limit

    def clear(self) -> None:
        """Forget all keys, queues and waiters."""
        self._values.clear()
        self._queues.clear()
        self._waits.clear()
        self._released.clear()
        self.size = self._released_size = 0

    # --- values --------------------------------------------------------------------------------------------------
    def set(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        self._put(key, value)
        self._waits.wake_all(key)

    def _put(self, key: bytes, value: bytes) -> None:
        former = self._values.get(key)
        more = len(value) - len(former) if former is not None else len(key) + len(value) + ENTRY_COST
        if self.size + more > self.limit:
            self._make_room(more)
        self._values[key] = value
        self.size += more
        if former is not None and len(former) > SHARED_FROM:
            leaving = _split(former)
            del former  # this variable would count as a reference
            self._release(leaving)

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, or None."""
        value = self._values.get(key)
        return b"".join(value.parts) if isinstance(value, Pieces) else value

    def get_parts(self, key: bytes) -> Sequence[bytes]:
        """Return a key's value in the pieces in which it is kept, none where it is missing; nothing is copied."""
        value = self._values.get(key)
        if value is None:
            return ()
        return tuple(value.parts) if isinstance(value, Pieces) else (value,)

    def measure(self, keys: Iterable[bytes]) -> int:
        """Return the bytes that the keys' values have together."""
        values = self._values
        return sum(len(values.get(key, b"")) for key in keys)

    def add(self, key: bytes, amount: int) -> int:
        """Count a key up.

        Args:
            key: The counter; 0 when missing.
            amount: What to add, negative to count down.

        Returns:
            The sum, wrapped to 64 bits.

        Raises:
            ValueError: The value there is not a number.
        """
        total = self._count(key, amount)
        self._waits.wake_all(key)
        return total

    def _count(self, key: bytes, amount: int) -> int:
        former = self._values.get(key)
        value = b"".join(former.parts) if isinstance(former, Pieces) else former
        total = amount if value is None else parse_integer(value) + amount
        if not _INT64_MIN <= total <= _INT64_MAX:
            total = (total - _INT64_MIN) % _MODULUS + _INT64_MIN
        self._put(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Replace a value if it is the expected one.

        Args:
            key: The key; when missing it is only set if `expected` is empty.
            expected: The value it must have.
            desired: The value it then gets.

        Returns:
            The value now; for a missing key that stays missing, `expected`.
        """
        value = self.get(key)
        if value is None and expected:
            return expected
        if value is None or value == expected:
            self._put(key, desired)
            self._waits.wake_all(key)
            return desired
        return value

    def append(self, key: bytes, value: bytes) -> None:
        """Put bytes behind a key's value; a missing key is set."""
        present = self._values.get(key)
        if present is None:
            self._put(key, value)
        else:
            if self.size + len(value) > self.limit:
                self._make_room(len(value))
            if isinstance(present, bytes):
                present = self._values[key] = Pieces(present)
            present.append(value)
            self.size += len(value)
        self._waits.wake_all(key)

    def multi_get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the keys' values, None for those missing."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
        """Give each key its value."""
        for key, value in zip(keys, values):  # noqa: B905 - `strict` costs a call; the wire has pairs
            self.set(key, value)

    def delete_key(self, key: bytes) -> bool:
        """Remove a key; returns whether it was there. Queues are no keys."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.size -= len(key) + len(value) + ENTRY_COST
        if len(value) > SHARED_FROM:
            leaving = _split(value)
            del value
            self._release(leaving)
        return True

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def list_keys(self) -> list[bytes]:
        """Return all keys."""
        return list(self._values)

    def check(self, keys: Iterable[bytes]) -> bool:
        """Whether all these are keys with a value or queues that hold something."""
        return all(self._is_there(key) for key in keys)

    def _is_there(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    # --- the bound -----------------------------------------------------------------------------------------------
    def _make_room(self, more: int) -> None:
        """Refuse more bytes, unless values that are not in the store any more have gone."""
        self.sweep()
        if self.size + more > self.limit:
            message = f"the store holds {self.size} bytes, and {more} more pass the limit of {self.limit}"
            raise LimitError(message, "store")

    def _release(self, leaving: list[bytes]) -> None:
        """Let go of values, and empty the list; those to which a reply refers count on."""
        while leaving:
            value = leaving.pop()
            if getrefcount(value) > _OWN_REFERENCES:
                self._keep_released(value)

    def _keep_released(self, value: bytes) -> None:
        self._released.append(value)
        self._released_size += len(value)
        self.size += len(value)
        if self._released_size > self._sweep_at:
            self.sweep()

    def sweep(self) -> None:
        """Forget the values that are neither in the store nor in a reply any more."""
        self.size -= self._released_size
        released, self._released, self._released_size = self._released, [], 0
        self._sweep_at = UNBOUNDED  # what is left is looked through once
        self._release(released)
        self._sweep_at = 2 * self._released_size + _SWEEP_FROM

    # --- queues --------------------------------------------------------------------------------------------------
    def queue_push(self, key: bytes, value: bytes) -> None:
        """Put a value at a queue's end, and wake the first client that waits for it."""
        queue = self._queues.get(key)
        more = len(value) + ENTRY_COST + (len(key) + QUEUE_COST if queue is None else 0)
        if self.size + more > self.limit:
            self._make_room(more)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        self.size += more
        self._waits.wake_one(key)

    def queue_pop(self, key: bytes) -> tuple[int, bytes]:
        """Take a queue's first value.

        Returns:
            The queue's length before, and the value; 0 and nothing when it is empty.
        """
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self.size -= len(value) + ENTRY_COST
        if not queue:
            del self._queues[key]
            self.size -= len(key) + QUEUE_COST
        if len(value) > SHARED_FROM:
            self._keep_released(value)  # the reply has it; its end is seen later
        return length, value

    def queue_len(self, key: bytes) -> int:
        """Return a queue's length, 0 when there is no such queue."""
        return len(self._queues.get(key, ()))

    def pass_on(self, key: bytes) -> None:
        """Wake the next client that waits for a queue, after the one woken before took nothing."""
        if self._queues.get(key):
            self._waits.wake_one(key)

    # --- waiting -------------------------------------------------------------------------------------------------
    def on_key(self, keys: Sequence[bytes], callback: Callable[[], None]) -> Waiter | None:
        """Call back once all keys have appeared.

        Args:
            keys: The keys. One that appears counts, also if it is deleted while others are missing.
            callback: Called once.

        Returns:
            The waiter, or None when all are there already: then nothing is called.
        """
        missing = {key for key in keys if not self._is_there(key)}
        return self._waits.add(missing, callback) if missing else None

    def barrier(self, key: bytes, world_size: int, callback: Callable[[], None]) -> Waiter | None:
        """Come to a barrier.

        Args:
            key: The barrier's name, a counter.
            world_size: The number of callers that opens it.
            callback: Called once when it opens.

        Returns:
            The waiter, or None when it is open: then all others have been called, and this callback isn't.

        Raises:
            ValueError: The value there is not a number.
        """
        if self._count(key, 1) < world_size:
            return self._waits.add({key}, callback)
        self._waits.wake_all(key)
        return None

    def cancel(self, waiter: Waiter) -> None:
        """Wait no longer; harmless after the call."""
        self._waits.cancel(waiter)


def _split(value: bytes | Pieces) -> list[bytes]:
    return value.parts if isinstance(value, Pieces) else [value]


def _count_own_references() -> int:
    """Return how many references `getrefcount` counts for a value that only a variable has: Pythons differ."""
    leaving = [bytes(SHARED_FROM)]
    value = leaving.pop()
    return getrefcount(value)


_OWN_REFERENCES = _count_own_references()
