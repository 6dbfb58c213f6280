"""The connection of one thread to the job store. A connection that breaks is opened again.

Rules
- A connection belongs to one thread; another thread may only `interrupt` it, which wakes the thread that waits in
  it. A thread may use the connection of another thread (`source`), where the store allows it, and never opens one then:
  it waits until that thread has opened its own, and knows which store it leads to.
- A store that was emptied, or moved, is another store under the same name, and so is one that was restored from a
  backup. Only the sender may meet it first, because then all facts have to be sent again. The others connect only to
  the store whose id they know, and after the sender has gone on in a store that was restored.
- Attempts to open a connection go on, with pauses, for as long as the session lives. Only the sender decides when to
  give up: it writes the heartbeats, and so knows best whether the store answers.
- A store that is slow because many nodes ask it must not be asked more often. So each pause between two attempts is
  random, and the longest possible pause grows. If no answer came in time, the next attempt waits for it twice as long,
  up to a lease.
"""

from __future__ import annotations

import threading

from elastic_run.store.backoff import Backoff, draw_fraction
from elastic_run.store.errors import FULL, REFUSED, REPLACED, SILENT, StoreConnectionError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.store.errors import StoreError
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["STORE_ID", "StoreConnection"]

#: Key of the store's id. The first agent that comes to an empty store writes it. It lies beside the decisions, because
#: an agent that reads it follows those next.
STORE_ID = "d/store_id"
#: Longest seconds between two attempts: at first; later; and while connections are refused, since such an attempt costs
#: nothing, and the store may be there any moment.
_PAUSE = 0.1
_LONGEST_PAUSE = 1.6
_REFUSED_PAUSE = 0.4
#: Seconds that an attempt and each later answer may take at least, also shortly before the store is given up.
_SHORTEST_TIMEOUT = 0.8


class StoreConnection:
    """A thread's connection.

    Args:
        backend: The store.
        timeout: Seconds for one attempt to open it, and for one answer.
        closing: Set when the session ends.
        expected_store_id: Returns the id that the store must have; None (instead of a function) takes any.
        source: The connection of another thread, to be shared (`JobStore.share`), or None.
        longest_timeout: Seconds to which `timeout` may grow while the store is silent.
        draw: Returns a random number from 0 to 1.
        on_full: Called with a line for the user whenever the store had no room for the connection.

    Attributes:
        store_id: The id of the store that the open connection leads to; if any store is taken, `identify` finds it.
        is_shared: Whether the connection that was used last is the source's own.
        expected_restores: Returns how often the store was restored, as far as the sender has gone on in it.
        time_left: Returns the seconds after which the store is given up, or the user is to be told of a first failure:
            no attempt to open it takes longer.
    """

    def __init__(
        self,
        backend: Backend,
        timeout: float,
        closing: threading.Event,
        expected_store_id: Callable[[], bytes | None] | None = None,
        *,
        source: StoreConnection | None = None,
        longest_timeout: float = 0.0,
        draw: Callable[[], float] = draw_fraction,
        on_full: Callable[[str], None] | None = None,
    ) -> None:
        self.store_id: bytes | None = None
        self.is_shared = False
        self.time_left: Callable[[], float] | None = None
        self.expected_restores: Callable[[], int] = lambda: 0
        self._expected_store_id = expected_store_id
        self._source = source
        self._backend = backend
        self._first_timeout = self._timeout = timeout
        self._longest_timeout = longest_timeout
        self._backoff = Backoff(_PAUSE, _LONGEST_PAUSE, draw)
        self._closing = closing
        self._on_full = on_full
        self._changed = threading.Condition()
        self._store: JobStore | None = None
        self._is_interrupted = False  # until the thread that it belongs to notices
        self._is_hurried = False  # the connection was opened with a shorter time for each answer than usual

    @property
    def store(self) -> JobStore:
        """The open connection, opened now if there is none.

        Raises:
            StoreConnectionError: One attempt failed, or the session ends.
            StoreAccessError: The store refuses us.
        """
        if self._store is None:
            opened = self._open() if self._source is None else self._share(self._source)
            with self._changed:
                self._store = opened
        else:
            # It has outlived what it was used for last: the store answers.
            self._timeout = self._first_timeout
            self._give_full_time(self._store)
            self._backoff.reset()
        if self._closing.is_set():
            self.drop()
            message = "the session is closed"
            raise StoreConnectionError(message)
        return self._store

    def _open(self) -> JobStore:
        timeout = self._timeout
        if self.time_left is not None:
            timeout = min(timeout, max(_SHORTEST_TIMEOUT, self.time_left()))
        self._is_hurried = timeout < self._first_timeout
        opened = self._backend.open(timeout)
        return opened if self._expected_store_id is None else self._check_id(opened, self._expected_store_id())

    def _share(self, source: StoreConnection) -> JobStore:
        with source._changed:
            source._changed.wait_for(lambda: source.store_id is not None or self._closing.is_set())
            store, self.store_id = source._store, source.store_id
        if store is None:
            message = "the session is closed"
            raise StoreConnectionError(message)
        opened = store.share()
        self.is_shared = opened.is_shared
        if self.is_shared:
            return opened
        opened.set_timeout(self._timeout)
        return self._check_id(opened, self.store_id)

    def _give_full_time(self, store: JobStore) -> None:
        if self._is_hurried:
            self._is_hurried = False
            store.set_timeout(self._first_timeout)

    def _check_id(self, opened: JobStore, expected: bytes | None) -> JobStore:
        """Return what was opened just now, if it leads to the expected store."""
        try:
            self.store_id = opened.follow(STORE_ID)
        except BaseException:
            opened.close()
            raise
        if self.store_id is None or self.store_id != expected or opened.restores != self.expected_restores():
            opened.close()
            message = f"the store at {self._backend.name} was replaced by another store"
            raise StoreConnectionError(message, REPLACED)
        return opened

    def identify(self, store_id: bytes) -> None:
        """Say which store the open connection leads to; a thread that shares it begins now."""
        with self._changed:
            if self._store is not None:
                self._give_full_time(self._store)  # the store answers, so it is not given up soon
            self.store_id = store_id
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection of this thread's own, as far as this side knows."""
        return self._store is not None and self._source is None and not self._is_interrupted

    def drop(self) -> None:
        """Close the connection; the next use opens another."""
        with self._changed:
            store, self._store, self.store_id = self._store, None, None
            self._is_interrupted = False
        if store is not None:
            store.close()

    def interrupt(self) -> None:
        """Wake the thread that waits in the connection, or for it, from any other; its operation fails."""
        with self._changed:
            store = self._store
            self._is_interrupted = store is not None
            self._changed.notify_all()
        if store is not None:
            store.close()

    def pause(self, error: StoreError) -> None:
        """Wait before the next attempt, or less if the session ends."""
        reason = getattr(error, "reason", None)
        if reason == FULL and self._on_full is not None:
            self._on_full(str(error))
        if reason == SILENT or isinstance(error, StoreTimeoutError):
            self._timeout = max(self._timeout, min(2 * self._timeout, self._longest_timeout))
        pause = self._backoff.next_pause(_REFUSED_PAUSE if reason == REFUSED else None)
        self._closing.wait(pause if self.time_left is None else min(pause, max(0.0, self.time_left())))
