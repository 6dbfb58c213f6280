"""Clients that wait for keys of a store in memory, and the memory that their waits take."""

from __future__ import annotations

from elastic_run.store.errors import LimitError
from elastic_run.store.limits import UNBOUNDED, WAIT_COST, WAITED_KEY_COST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Waiter:
    """One client's wait for keys.

    Attributes:
        missing: The keys that are not there yet.
        queue: The queue whose push ended the wait, or None.
    """

    __slots__ = ("callback", "cost", "missing", "queue")

    def __init__(self, missing: set[bytes], callback: Callable[[], None]) -> None:
        self.cost = len(missing) * WAIT_COST + sum(map(len, missing))
        self.missing = missing
        self.callback: Callable[[], None] | None = callback
        self.queue: bytes | None = None


class Waits:
    """Waiters by the keys that they miss.

    Attributes:
        by_key: The waiters for a key in order of arrival. A dict, since a thousand may wait for one key and each may
            cancel.
        limit: Bytes that they may take.
        size: Bytes that they take.
    """

    def __init__(self) -> None:
        self.by_key: dict[bytes, dict[Waiter, None]] = {}
        self.limit = UNBOUNDED
        self.size = 0

    def clear(self) -> None:
        """Forget all waiters; none is called."""
        for waiters in self.by_key.values():
            for waiter in waiters:
                waiter.cost = 0  # a later cancellation gives nothing back
        self.by_key.clear()
        self.size = 0

    def cancel(self, waiter: Waiter) -> None:
        """Wait no longer; harmless after the call."""
        waiter.callback = None
        self._give_back(waiter)
        for key in waiter.missing:
            waiters = self.by_key.get(key)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    self._forget_waited(key)

    def add(self, missing: set[bytes], callback: Callable[[], None]) -> Waiter:
        """Wait for keys.

        Args:
            missing: The keys.
            callback: Called once, when they have come.

        Raises:
            LimitError: All that wait would take too much.
        """
        waiter = Waiter(missing, callback)
        if self.size + waiter.cost > self.limit:
            message = f"waits hold {self.size} bytes, and {waiter.cost} more pass the limit of {self.limit}"
            raise LimitError(message, "waits")
        self.size += waiter.cost
        for key in missing:
            waiters = self.by_key.get(key)
            if waiters is None:
                waiters = self.by_key[key] = {}
                self.size += WAITED_KEY_COST
            waiters[waiter] = None
        return waiter

    def _forget_waited(self, key: bytes) -> dict[Waiter, None]:
        self.size -= WAITED_KEY_COST
        return self.by_key.pop(key)

    def _give_back(self, waiter: Waiter) -> None:
        self.size -= waiter.cost
        waiter.cost = 0

    def wake_all(self, key: bytes) -> None:
        """Tell all clients that wait for a key that it is there."""
        if key in self.by_key:
            for waiter in self._forget_waited(key):
                self._found(waiter, key)

    def wake_one(self, key: bytes) -> None:
        """Call the first whose wait a queue's new value ends."""
        # Waits that lack other keys too are told first; they don't use the value up.
        while waiters := self.by_key.get(key):
            waiter = next(iter(waiters))
            del waiters[waiter]
            if not waiters:
                self._forget_waited(key)
            waiter.queue = key
            if self._found(waiter, key):
                return

    def _found(self, waiter: Waiter, key: bytes) -> bool:
        """Note that a key has appeared; returns whether that ended the wait."""
        waiter.missing.discard(key)
        callback = waiter.callback
        if waiter.missing or callback is None:
            return False
        waiter.callback = None
        self._give_back(waiter)
        callback()
        return True
