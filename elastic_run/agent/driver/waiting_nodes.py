"""Asks a foreign rendezvous whether nodes wait for the next round; such a rendezvous has no way to notify the agent.

A job also learns of a failed worker on another node in this way: that node's agent returns to the rendezvous and waits.
`monitor_interval` is the time between two questions; elastic-run uses it only here.
"""

from __future__ import annotations

from elastic_run.agent.plugin_calls import name_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.plugin_calls import PluginCalls
    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.api import RendezvousHandler


class WaitingNodesWatch:
    """Asks one handler, until nodes wait or it is closed."""

    def __init__(
        self,
        loop: Loop,
        calls: PluginCalls,
        handler: RendezvousHandler,
        interval: float,
        on_waiting: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._handler = handler
        self._interval = interval
        self._on_waiting = on_waiting
        self._is_over = False
        self._timer = self._ask_later()

    def close(self) -> None:
        """Look no more; harmless when closed."""
        self._is_over = True
        self._timer.cancel()

    def _ask_later(self) -> Timer:
        name = name_call(self._handler, "num_nodes_waiting")
        return self._loop.call_later(self._interval, lambda: self._calls.post(name, self._ask))

    def _ask(self) -> None:
        try:
            has_waiting = self._handler.num_nodes_waiting() > 0
        except Exception:  # noqa: BLE001 - a plug-in's; it can't be reached now, and may be later
            has_waiting = False
        self._loop.call_soon_threadsafe(lambda: self._take(has_waiting=has_waiting))

    def _take(self, *, has_waiting: bool) -> None:
        if self._is_over:
            return
        if has_waiting:
            self._on_waiting()
        else:
            self._timer = self._ask_later()
