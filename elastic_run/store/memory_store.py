"""A store in memory: values, counters, queues, and the clients that wait for them. No I/O, no clock, no thread.

Rules
- Keys and values are bytes, as on the wire. The operations have the names and the semantics of torch's Store, whose
  odd corners are listed in `wire`.
- Nothing blocks. `on_key` and `barrier` return a `Waiter` that is called back, once, from within the operation that
  ends the wait. A client that waits no longer cancels it.
- The content has a bound, `limit`; an operation that would pass it raises `WireError` and changes nothing.
- A push to a queue wakes one waiter, the first, since there is one value to have. If that client dies just then, the
  others sleep until the next push, as with torch's server.
"""

from __future__ import annotations

from collections import deque

from elastic_run.store.errors import WireError
from elastic_run.store.wire import ENTRY_COST, QUEUE_COST, UNBOUNDED, WAIT_COST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MODULUS = 1 << 64
_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_INT64_DIGITS = 19
_C_SPACE = b" \t\n\v\f\r"
#: Bytes of a piece to which `append` still adds.
_PIECE = 16 * 1024


class Waiter:
    """A client that waits for keys."""

    def __init__(self, missing: set[bytes], callback: Callable[[], None]) -> None:
        self.cost = len(missing) * WAIT_COST + sum(map(len, missing))  # the bytes of memory that this object counts for
        self.missing = missing  # the keys that are not set yet
        self.callback: Callable[[], None] | None = callback


class Pieces:
    """A value that has grown, in its pieces: neither growing nor reading it copies the whole."""

    def __init__(self, first: bytes) -> None:
        self.parts = [first]
        self.size = len(first)

    def __len__(self) -> int:
        return self.size

    def append(self, value: bytes) -> None:
        """Put bytes behind it."""
        self.size += len(value)
        last = self.parts.pop()
        self.parts += (last + value,) if len(last) + len(value) <= _PIECE else (last, value)


class MemoryStore:
    """The contents of a store: values by key, queues, and clients that wait for a key."""

    def __init__(self) -> None:
        self.limit = UNBOUNDED  # the most bytes of keys and values
        self.size = 0  # the bytes of keys and values now
        #: The waiters for a key in order of arrival. A dict, since a thousand may wait for one key and each may cancel.
        self.waiters: dict[bytes, dict[Waiter, None]] = {}
        self._values: dict[bytes, bytes | Pieces] = {}
        self._queues: dict[bytes, deque[bytes]] = {}

    def clear(self) -> None:
        """Forget all keys, queues and waiters; none is called."""
        self._values.clear()
        self._queues.clear()
        self.waiters.clear()
        self.size = 0

    # --- values --------------------------------------------------------------------------------------------------
    def set(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        self._put(key, value)
        self._wake_all(key)

    def _put(self, key: bytes, value: bytes) -> None:
        present = self._values.get(key)
        more = len(value) - len(present) if present is not None else len(key) + len(value) + ENTRY_COST
        self._reserve(more)
        self._values[key] = value

    def _reserve(self, more: int) -> None:
        if self.size + more > self.limit:
            message = f"the store holds {self.size} bytes, and {more} more pass the limit of {self.limit}"
            raise WireError(message, "store")
        self.size += more

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, or None."""
        value = self._values.get(key)
        return b"".join(value.parts) if isinstance(value, Pieces) else value

    def get_parts(self, key: bytes) -> Sequence[bytes]:
        """Return a key's value in the pieces in which it is kept, none if it is missing; nothing is copied."""
        value = self._values.get(key)
        if value is None:
            return ()
        return tuple(value.parts) if isinstance(value, Pieces) else (value,)

    def measure(self, keys: Iterable[bytes]) -> int:
        """Return the bytes that the keys' values have together."""
        values = self._values
        return sum(len(values.get(key, b"")) for key in keys)

    def add(self, key: bytes, amount: int) -> int:
        """Count a key up, from 0 if it is missing; return the sum, wrapped to 64 bits.

        Raises ValueError if the value there is not a number.
        """
        total = self._count(key, amount)
        self._wake_all(key)
        return total

    def _count(self, key: bytes, amount: int) -> int:
        value = self.get(key)
        total = amount if value is None else parse_integer(value) + amount
        if not _INT64_MIN <= total <= _INT64_MAX:
            total = (total - _INT64_MIN) % _MODULUS + _INT64_MIN
        self._put(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Replace a value if it is the expected one; a missing key is set if `expected` is empty.

        Returns the value now; for a missing key that stays missing, `expected`.
        """
        value = self.get(key)
        if value is None and expected:
            return expected
        if value is None or value == expected:
            self.set(key, desired)
            return desired
        return value

    def append(self, key: bytes, value: bytes) -> None:
        """Put bytes behind a key's value; a missing key is set."""
        present = self._values.get(key)
        if present is None:
            self._put(key, value)
        else:
            self._reserve(len(value))
            if isinstance(present, bytes):
                present = self._values[key] = Pieces(present)
            present.append(value)
        self._wake_all(key)

    def multi_set(self, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
        """Give each key its value."""
        for key, value in zip(keys, values):  # noqa: B905 - `strict` costs a call; the wire has pairs
            self.set(key, value)

    def delete_key(self, key: bytes) -> bool:
        """Remove a key; return whether it was there. Queues are no keys."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self.size -= len(key) + len(value) + ENTRY_COST
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

    # --- queues --------------------------------------------------------------------------------------------------
    def queue_push(self, key: bytes, value: bytes) -> None:
        """Put a value at a queue's end, and wake the first client that waits for it."""
        queue = self._queues.get(key)
        self._reserve(len(value) + ENTRY_COST + (len(key) + QUEUE_COST if queue is None else 0))
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        self._wake_one(key)

    def queue_pop(self, key: bytes) -> tuple[int, bytes]:
        """Take a queue's first value; return the queue's length before, and the value: 0 and nothing if it is empty."""
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self.size -= len(value) + ENTRY_COST
        if not queue:
            del self._queues[key]
            self.size -= len(key) + QUEUE_COST
        return length, value

    def queue_len(self, key: bytes) -> int:
        """Return a queue's length, 0 if there is no such queue."""
        return len(self._queues.get(key, ()))

    # --- waiting -------------------------------------------------------------------------------------------------
    def on_key(self, keys: Iterable[bytes], callback: Callable[[], None]) -> Waiter | None:
        """Call back, once, when all keys have appeared; a key counts also if it is deleted while others are missing.

        Returns None if all are there already: then nothing is called.
        """
        missing = {key for key in keys if not self._is_there(key)}
        return self._add(Waiter(missing, callback)) if missing else None

    def barrier(self, key: bytes, world_size: int, callback: Callable[[], None]) -> Waiter | None:
        """Come to a barrier, a counter that so many callers open, and call back when it opens.

        Returns None if it is open: then all others have been called, and this callback isn't. Raises as `add` does.
        """
        if self._count(key, 1) < world_size:
            return self._add(Waiter({key}, callback))
        self._wake_all(key)
        return None

    def _add(self, waiter: Waiter) -> Waiter:
        for key in waiter.missing:
            self.waiters.setdefault(key, {})[waiter] = None
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """Wait no longer; harmless after the call."""
        waiter.callback = None
        for key in waiter.missing:
            waiters = self.waiters.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self.waiters.pop(key, None)

    def _wake_all(self, key: bytes) -> None:
        if key in self.waiters:
            for waiter in self.waiters.pop(key):
                _end_wait_for(waiter, key)

    def _wake_one(self, key: bytes) -> None:
        # Waiters that lack other keys too are passed over; they don't use the value up.
        while waiters := self.waiters.get(key):
            waiter = next(iter(waiters))
            del waiters[waiter]
            if not waiters:
                del self.waiters[key]
            if _end_wait_for(waiter, key):
                return


def _end_wait_for(waiter: Waiter, key: bytes) -> bool:
    """Take a key that has appeared from those that a client waits for; return whether that ended the wait."""
    waiter.missing.discard(key)
    callback = waiter.callback
    if waiter.missing or callback is None:
        return False
    waiter.callback = None
    callback()
    return True


def parse_integer(text: bytes) -> int:
    """Read a number as C's `strtoll` does, as torch's server: leading space, a sign, and any rest is ignored.

    Raises ValueError if there is no digit, or the number doesn't fit 64 bits.
    """
    if text.isdigit() and len(text) < _INT64_DIGITS:
        return int(text)
    signed = text.lstrip(_C_SPACE)
    unsigned = signed[1:] if signed[:1] in (b"-", b"+") else signed
    digits = unsigned[: len(unsigned) - len(unsigned.lstrip(b"0123456789"))]
    if not digits:
        message = f"{text[:40]!r} is not a number"
        raise ValueError(message)
    significant = digits.lstrip(b"0") or b"0"
    # Python refuses, or takes quadratic time for, a number of a million digits: the length decides first.
    number = int(significant) if len(significant) <= _INT64_DIGITS else _INT64_MAX + 2
    number = -number if signed[:1] == b"-" else number
    if not _INT64_MIN <= number <= _INT64_MAX:
        message = f"{text[:40]!r} does not fit 64 bits"
        raise ValueError(message)
    return number
