"""Looks whether nodes wait for the next round of a foreign rendezvous, which has no other way of telling us.

That is how such a job learns that another node's worker failed, too: its agent comes back to the rendezvous, and waits.
`monitor_interval` says how often; the only place where it counts. A thread asks, because a handler may take its time.
"""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.rendezvous.api import RendezvousHandler


class NewcomerWatch:
    """Asks one handler, until nodes wait or it is closed.

    Args:
        loop: The agent's loop.
        handler: The rendezvous.
        interval: Seconds between two looks.
        on_waiting: Called once, on the loop.
    """

    def __init__(self, loop: Loop, handler: RendezvousHandler, interval: float, on_waiting: Callable[[], None]) -> None:
        self._loop = loop
        self._handler = handler
        self._interval = interval
        self._on_waiting = on_waiting
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="newcomers", daemon=True).start()

    def close(self) -> None:
        """Look no more; harmless when closed."""
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(self._interval):
            if self._has_newcomers() and not self._is_over.is_set():
                self._loop.call_soon_threadsafe(self._on_waiting)
                return

    def _has_newcomers(self) -> bool:
        try:
            return self._handler.num_nodes_waiting() > 0
        except Exception:  # noqa: BLE001 - a plug-in's; it can't be reached now, and may be later
            return False
