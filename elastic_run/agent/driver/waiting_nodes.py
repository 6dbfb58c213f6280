"""Asks a foreign rendezvous whether nodes wait for the next round; such a rendezvous has no way to notify the agent.

A job also learns of a failed worker on another node in this way: that node's agent returns to the rendezvous and waits.
`monitor_interval` is the time between two questions; elastic-run uses it only here. The question is asked in a thread,
because a handler may block.
"""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.rendezvous.api import RendezvousHandler


class WaitingNodesWatch:
    """Asks one handler, until nodes wait or it is closed."""

    def __init__(self, loop: Loop, handler: RendezvousHandler, interval: float, on_waiting: Callable[[], None]) -> None:
        self._loop = loop
        self._handler = handler
        self._interval = interval
        self._on_waiting = on_waiting
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="waiting nodes", daemon=True).start()

    def close(self) -> None:
        """Look no more; harmless when closed."""
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(self._interval):
            if self._has_waiting_nodes() and not self._is_over.is_set():
                self._loop.call_soon_threadsafe(self._on_waiting)
                return

    def _has_waiting_nodes(self) -> bool:
        try:
            return self._handler.num_nodes_waiting() > 0
        except Exception:  # noqa: BLE001 - a plug-in's; it can't be reached now, and may be later
            return False
