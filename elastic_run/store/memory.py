"""A store in memory: values, counters, queues, and those who wait for them. No I/O, no clock, no thread.

Rules
- Keys and values are bytes, as on the wire. The operations have the names and the semantics of torch's Store, whose
  odd corners are listed in `wire`.
- Nothing blocks. `on_key` and `barrier` return a `Waiter` that is called back, once, from within the operation that
  ends the wait. Whoever loses interest cancels it.
- A push to a queue wakes one waiter, the first, since there is one thing to have. When that one turns away without it
  (its own deadline passed just then, or it died), `pass_on` wakes the next: torch's server leaves it asleep.
"""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    Keys: TypeAlias = set[bytes]  # within the class `set` is a method

_MODULUS = 1 << 64
_INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)
_INT64_DIGITS = 19
_C_SPACE = b" \t\n\v\f\r"


class Waiter:
    """Somebody who waits for keys.

    Attributes:
        missing: The keys that are not there yet.
        queue: The queue whose push ended the wait, or None.
    """

    __slots__ = ("callback", "missing", "queue")

    def __init__(self, missing: Keys, callback: Callable[[], None]) -> None:
        self.missing = missing
        self.callback: Callable[[], None] | None = callback
        self.queue: bytes | None = None


class MemoryStore:
    """Keys with values, queues, and waiters."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        # By key, in order of arrival. A dict, since a thousand may wait for one key and each may cancel.
        self._waiters: dict[bytes, dict[Waiter, None]] = {}

    def clear(self) -> None:
        """Forget all keys, queues and waiters."""
        self._values.clear()
        self._queues.clear()
        self._waiters.clear()

    # --- values --------------------------------------------------------------------------------------------------
    def set(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        self._values[key] = value
        self._wake_all(key)

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, or None."""
        value = self._values.get(key)
        return bytes(value) if isinstance(value, bytearray) else value

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
        self._wake_all(key)
        return total

    def _count(self, key: bytes, amount: int) -> int:
        value = self._values.get(key)
        total = amount if value is None else parse_integer(value) + amount
        if not _INT64_MIN <= total <= _INT64_MAX:
            total = (total - _INT64_MIN) % _MODULUS + _INT64_MIN
        self._values[key] = b"%d" % total
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
        value = self._values.get(key)
        if value is None and expected:
            return expected
        if value is None or value == expected:
            self._values[key] = desired
            self._wake_all(key)
            return desired
        return bytes(value)

    def append(self, key: bytes, value: bytes) -> None:
        """Put bytes behind a key's value; a missing key is set."""
        present = self._values.get(key)
        if isinstance(present, bytearray):
            present += value
        else:
            # A bytearray from the second piece on: many small pieces would otherwise be copied again and again.
            self._values[key] = value if present is None else bytearray(present) + value
        self._wake_all(key)

    def multi_get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the keys' values, None for those missing."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
        """Give each key its value."""
        for key, value in zip(keys, values):  # noqa: B905 - `strict` costs a call; the wire has pairs
            self.set(key, value)

    def delete_key(self, key: bytes) -> bool:
        """Remove a key; returns whether it was there. Queues are no keys."""
        return self._values.pop(key, None) is not None

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
        """Put a value at a queue's end, and wake the first who waits for it."""
        self._queues.setdefault(key, deque()).append(value)
        self._wake_one(key)

    def queue_pop(self, key: bytes) -> tuple[int, bytes]:
        """Take a queue's first value.

        Returns:
            The queue's length before, and the value; 0 and nothing when it is empty.
        """
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        if not queue:
            del self._queues[key]
        return length, value

    def queue_len(self, key: bytes) -> int:
        """Return a queue's length, 0 when there is no such queue."""
        return len(self._queues.get(key, ()))

    def pass_on(self, key: bytes) -> None:
        """Wake the next who waits for a queue, after the one woken before took nothing."""
        if self._queues.get(key):
            self._wake_one(key)

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
        return self._wait(missing, callback) if missing else None

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
            return self._wait({key}, callback)
        self._wake_all(key)
        return None

    def cancel(self, waiter: Waiter) -> None:
        """Wait no longer; harmless after the call."""
        waiter.callback = None
        for key in waiter.missing:
            waiters = self._waiters.get(key)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._waiters[key]

    def _wait(self, missing: Keys, callback: Callable[[], None]) -> Waiter:
        waiter = Waiter(missing, callback)
        for key in missing:
            self._waiters.setdefault(key, {})[waiter] = None
        return waiter

    def _wake_all(self, key: bytes) -> None:
        if key in self._waiters:
            for waiter in self._waiters.pop(key):
                _found(waiter, key)

    def _wake_one(self, key: bytes) -> None:
        # Those who miss other keys too are told on the way; they don't use the value up.
        while waiters := self._waiters.get(key):
            waiter = next(iter(waiters))
            del waiters[waiter]
            if not waiters:
                del self._waiters[key]
            waiter.queue = key
            if _found(waiter, key):
                return


def _found(waiter: Waiter, key: bytes) -> bool:
    """Note that a key has appeared; returns whether that ended the wait."""
    waiter.missing.discard(key)
    callback = waiter.callback
    if waiter.missing or callback is None:
        return False
    waiter.callback = None
    callback()
    return True


def parse_integer(text: bytes | bytearray) -> int:
    """Read a number as C's `strtoll` does, to which torch leaves it: leading space, a sign, and any rest is ignored.

    Args:
        text: What a client has set.

    Returns:
        The number.

    Raises:
        ValueError: There is no digit, or the number doesn't fit 64 bits.
    """
    if text.isdigit() and len(text) < _INT64_DIGITS:
        return int(text)
    signed = bytes(text).lstrip(_C_SPACE)
    unsigned = signed[1:] if signed[:1] in (b"-", b"+") else signed
    digits = unsigned[: len(unsigned) - len(unsigned.lstrip(b"0123456789"))]
    if not digits:
        message = f"{bytes(text[:40])!r} is not a number"
        raise ValueError(message)
    significant = digits.lstrip(b"0") or b"0"
    # Python refuses, or takes quadratic time for, a number of a million digits: look at the length first.
    number = int(significant) if len(significant) <= _INT64_DIGITS else _INT64_MAX + 2
    number = -number if signed[:1] == b"-" else number
    if not _INT64_MIN <= number <= _INT64_MAX:
        message = f"{bytes(text[:40])!r} does not fit 64 bits"
        raise ValueError(message)
    return number
