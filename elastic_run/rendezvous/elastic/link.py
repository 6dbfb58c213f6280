"""One thread's connection to the job store, which is opened anew when it breaks.

Rules
- A connection belongs to one thread; another thread may only `interrupt` it, which wakes whoever waits in it.
- A store that was emptied, or moved, is another store under the same name. Only the speaker may meet it first, because
  then all has to be said again; the others take a connection only to the store that they know by its birth mark.
- Opening waits a moment between two attempts, for as long as the session lives: when to give up is decided in one
  place only, by the speaker, which beats and so knows best whether the store answers.
"""

from __future__ import annotations

import threading

from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.backends import Backend
    from elastic_run.store.job_store import JobStore

__all__ = ["BIRTH", "Link"]

#: Key of the store's birth mark: the first agent's, who came to it when it was empty.
BIRTH = "birth"
#: Seconds between two attempts.
_PAUSE = 0.1


class Link:
    """A thread's connection.

    Args:
        backend: The store.
        timeout: Seconds for one attempt to open it, and for one answer.
        closing: Set when the session ends.
        expected_birth: Returns the birth mark that the store must have; None (instead of a function) takes any.

    Attributes:
        birth: The birth mark of the store that the connection was last opened to.
    """

    def __init__(
        self,
        backend: Backend,
        timeout: float,
        closing: threading.Event,
        expected_birth: Callable[[], bytes | None] | None = None,
    ) -> None:
        self.birth: bytes | None = None
        self._expected_birth = expected_birth
        self._backend = backend
        self._timeout = timeout
        self._closing = closing
        self._lock = threading.Lock()
        self._store: JobStore | None = None

    @property
    def store(self) -> JobStore:
        """The open connection, opened now if there is none.

        Raises:
            StoreConnectionError: One attempt failed, or the session ends.
            StoreAccessError: The store refuses us.
        """
        if self._store is None:
            opened = self._open()
            with self._lock:
                self._store = opened
        if self._closing.is_set():
            self.drop()
            message = "the session is closed"
            raise StoreConnectionError(message)
        return self._store

    def _open(self) -> JobStore:
        opened = self._backend.open(self._timeout)
        if self._expected_birth is None:
            return opened
        try:
            self.birth = opened.get([BIRTH])[0]
        except BaseException:
            opened.close()
            raise
        if self.birth is None or self.birth != self._expected_birth():
            opened.close()
            message = f"the store at {self._backend.name} is not the one that it was"
            raise StoreConnectionError(message)
        return opened

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as this side knows."""
        return self._store is not None

    def drop(self) -> None:
        """Close the connection; the next use opens another."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def interrupt(self) -> None:
        """Wake the thread that waits in the connection, from any other; its operation fails."""
        with self._lock:
            store = self._store
        if store is not None:
            store.close()

    def pause(self) -> None:
        """Wait a moment, or less if the session ends."""
        self._closing.wait(_PAUSE)
