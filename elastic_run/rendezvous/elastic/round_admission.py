"""The way into a round: between the coordinator's decision and the agent, which is told with `Formed`.

Rules
- The agent hears of a round only once the way to rank 0's store was seen to be open from here: workers that can't reach
  it would only time out, much later and with less to say. A thread looks, so that nothing else has to wait.
- A round that is halted before that was never the agent's: the session answers for it that nothing ran. The halt may
  come between two steps of the thread that has found the way closed; the agent hears nothing of it then, either.
- A warning that comes before the agent has the round waits for it.
- Where agents and workers share one server (static), rank 0's session empties the workers' half when the round was
  formed, since only then no worker of the last round lives anywhere, and says so; the others wait for its word.
"""

from __future__ import annotations

import threading
import time

from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol import messages
from elastic_run.rendezvous.addresses import find_trouble
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.protocol.messages import Assignment, StoreAddress
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["RoundAdmission"]

#: Seconds to reach rank 0's store.
_REACH = 5.0
#: Rounds of which it stays known that they were opened.
_KEPT = 2


class RoundAdmission:
    """Lets the agent into its rounds.

    Args:
        context: The data that the session's threads share.
        feed: Feeds the member.
        store_address: Returns where this node's store of the next round listens.
        shares_server: Whether workers and agents share one server.
    """

    def __init__(
        self,
        context: SessionContext,
        *,
        feed: Callable[[node_messages.Event], None],
        store_address: Callable[[], StoreAddress],
        shares_server: bool = False,
    ) -> None:
        self._context = context
        self._feed = feed
        self._store_address = store_address
        self._shares_server = shares_server
        self._lock = threading.RLock()
        self._awaited: node_messages.Formed | None = None
        self._admitted: int | None = None  # the round that the agent has, unless another one was announced since
        self._warned: node_messages.Warned | None = None
        self._opened: list[str] = []  # keys by which this node, as rank 0, has opened rounds

    def announce(self, formed: node_messages.Formed) -> None:
        """Let the agent have a round as soon as the way is open; doesn't block."""
        assignment = formed.assignment
        with self._lock:
            self._awaited, self._admitted, self._warned = formed, None, None
        if assignment.group_rank == 0 and not self._shares_server:
            self._admit(formed)
        else:
            self._context.spawn(f"way into round {assignment.round}", lambda: self._look(formed))

    def has_withdrawn(self, number: int) -> bool:
        """Report a round that the job stops as over, if the agent was never told of it.

        Args:
            number: The round.

        Returns:
            Whether the agent was never told; it must not be told of the stop either.
        """
        with self._lock:
            if self._awaited is None or self._awaited.assignment.round != number:
                return self._admitted != number
            self._awaited = None
        self._feed(node_messages.WorkersGone(number, messages.STOPPED, self._store_address()))
        return True

    def warn(self, warned: node_messages.Warned) -> None:
        """Tell the agent that a round will be stopped soon, as soon as it has that round."""
        with self._lock:
            if self._awaited is not None and self._awaited.assignment.round == warned.round:
                self._warned = warned
            elif self._admitted == warned.round:
                self._context.events.post(warned)
        self._context.events.tell_agent()

    # --- the thread ----------------------------------------------------------------------------------------------
    def _look(self, formed: node_messages.Formed) -> None:
        assignment = formed.assignment
        trouble = self._share_server(assignment) if self._shares_server else None
        if trouble is None and assignment.group_rank != 0:
            trouble = self._trouble_on_the_way(assignment)
        if trouble is None:
            self._admit(formed)
        else:
            self._refuse(formed, trouble)

    def _share_server(self, assignment: Assignment) -> str | None:
        """Empty the workers' half as rank 0, or wait until rank 0 has done so; returns what is wrong, or None."""
        context = self._context
        store_id = context.sender.store_id
        connection = context.make_connection(lambda: store_id)
        if assignment.group_rank == 0 and context.backend.hosted is not None:
            context.backend.hosted.reset()
        deadline = time.monotonic() + _REACH
        key = f"open/{assignment.round}"
        try:
            while True:
                try:
                    if assignment.group_rank == 0:
                        self._open(connection.store, key)
                    elif connection.store.wait(key, _REACH) is None:
                        return "rank 0 does not begin the round"
                except StoreConnectionError as error:
                    # Emptying the workers' half also closes connections that have not yet shown whose they are.
                    if time.monotonic() >= deadline or context.signals.closing.is_set():
                        return str(error)
                    connection.drop()
                    connection.pause(error)
                else:
                    return None
        finally:
            connection.drop()
            context.connections.remove(connection)

    def _open(self, store: JobStore, key: str) -> None:
        """Open a round for the other nodes, and delete the keys of rounds so old that no node waits for them."""
        store.write({key: b"1"})
        if key not in self._opened:
            self._opened.append(key)
        store.delete(self._opened[:-_KEPT])
        del self._opened[:-_KEPT]

    def _trouble_on_the_way(self, assignment: Assignment) -> str | None:
        master = assignment.master
        if not master.use_agent_store:
            return None  # its worker of rank 0 opens the port, later
        trouble = find_trouble(master.host, master.port, _REACH)
        if trouble is None:
            return None
        here = f"{self._context.node_info.host} ({self._context.sender.local_addr})"
        return f"{here} can't reach the store of rank 0 at {format_endpoint(master.host, master.port)}: {trouble}"

    def _admit(self, formed: node_messages.Formed) -> None:
        """Tell the agent of the round."""
        with self._lock:
            if self._awaited is not formed:
                return
            self._awaited, self._admitted = None, formed.assignment.round
            # In its place before a halt of the round can come; told without the lock.
            self._context.events.post(formed)
            if self._warned is not None:
                self._context.events.post(self._warned)
        self._context.events.tell_agent()

    def _refuse(self, formed: node_messages.Formed, detail: str) -> None:
        """Say that this node's workers were not started, since the way is closed."""
        with self._lock:
            if self._awaited is not formed:
                return
            self._awaited = None
        self._feed(
            node_messages.WorkersGone(
                formed.assignment.round, messages.UNREACHABLE, self._store_address(), detail=detail
            )
        )
