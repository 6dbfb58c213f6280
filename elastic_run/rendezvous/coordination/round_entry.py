"""The way into a round: between the coordinator's order and the agent, which is told with `Formed`.

The agent hears of a round only once the way to rank 0's store was seen to be open from here: workers that can't reach
it would only time out, much later and with less to say. A round that is halted before was never the agent's.
"""

from __future__ import annotations

import threading

from elastic_run.core.protocol.outcomes import STOPPED, UNREACHABLE
from elastic_run.rendezvous.addresses import find_trouble
from elastic_run.store.connecting import format_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.job.node_events import Formed, Halted, Warned
    from elastic_run.loop import Loop

__all__ = ["RoundEntry"]

#: Seconds to reach rank 0's store.
_REACH = 5.0


class RoundEntry:
    """Lets one agent into its rounds: brings it their events, or ends a round of which the agent was never told."""

    def __init__(
        self,
        loop: Loop,
        deliver: Callable[[Formed | Halted | Warned], None],
        end_round: Callable[[int, str, str], None],
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._end_round = end_round
        self._formed: Formed | None = None  # the way is not yet seen to be open
        self._warned: Warned | None = None

    def announce(self, formed: Formed, here: str) -> None:
        """Let the agent have a round as soon as the way is open; `here` names this node in messages."""
        place = formed.assignment
        self._formed, self._warned = formed, None
        if place.group_rank == 0 or not place.master.use_agent_store:
            self._admit(formed, "")
            return
        host, port = place.master.host, place.master.port

        def look() -> None:
            trouble = find_trouble(host, port, _REACH)
            where = f"{here} can't reach the store of rank 0 at {format_endpoint(host, port)}"
            detail = "" if trouble is None else f"{where}: {trouble}"
            self._loop.call_soon_threadsafe(lambda: self._admit(formed, detail))

        threading.Thread(target=look, name="rendezvous-way", daemon=True).start()

    def warn(self, warned: Warned) -> None:
        """Tell the agent that its round will be stopped, as soon as it has that round."""
        if self._formed is None:
            self._deliver(warned)
        else:
            self._warned = warned

    def halt(self, halted: Halted) -> None:
        """Tell the agent to stop a round, or the coordinator that the agent was never told of it."""
        if self._formed is not None and self._formed.assignment.round == halted.round:
            self._formed = None
            self._end_round(halted.round, STOPPED, "")
        else:
            self._deliver(halted)

    def _admit(self, formed: Formed, trouble: str) -> None:
        if self._formed is not formed:
            return
        self._formed = None
        if trouble:
            self._end_round(formed.assignment.round, UNREACHABLE, trouble)
            return
        self._deliver(formed)
        if self._warned is not None:
            self._deliver(self._warned)
