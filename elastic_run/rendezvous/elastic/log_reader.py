"""The thread that follows the log of decisions: it blocks on the next slot and feeds what appears there.

It begins with the connection over which the sender has said this node's first facts. So a node of a large job has one
connection while the nodes gather; the sender opens another one with its first heartbeat, or with the next fact.

In another store another log reader begins, with a connection of its own. This one may be on its way to a machine that
is dark, which nothing can interrupt, and the round would have to wait for it.
"""

from __future__ import annotations

from elastic_run.rendezvous.elastic.decision_log import wait_entry
from elastic_run.store.errors import CLOSED, REFUSED, StoreAccessError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["LogReader"]

#: Seconds that one wait for a slot takes at most.
_LONGEST_WAIT = 30.0
#: Seconds to wait for the sender, which reads where the log stands.
_MOMENT = 0.5
#: Seconds before a store that refuses us is asked again; the sender, which is refused as well, tells the agent.
_REFUSED = 5.0
#: After these the sender looks whether the store is still there.
_BROKEN = (CLOSED, REFUSED)


class LogReader:
    """Follows the log for one node.

    Args:
        context: What the session's threads share.
        member_driver: The node's member.
        store: The sender's connection, which this thread takes over; None to open another one.
    """

    def __init__(self, context: SessionContext, member_driver: MemberDriver, store: JobStore | None = None) -> None:
        self._context = context
        self._member_driver = member_driver
        self._connection = context.make_connection(lambda: context.sender.store_id)
        if store is not None:
            self._connection.take(store, context.sender.store_id)
        self._is_abandoned = False

    def abandon(self) -> None:
        """End as soon as the thread can: another follows the log from now on."""
        self._is_abandoned = True
        self._connection.interrupt()

    def run(self) -> None:
        """Follow until the session ends or its last event came, or another does."""
        context = self._context
        while not (self._is_abandoned or context.signals.closing.is_set() or context.events.is_over.is_set()):
            try:
                self._turn(self._connection.store)
            except StoreAccessError:
                self._connection.drop()
                context.signals.closing.wait(_REFUSED)
            except StoreError as error:
                self._connection.drop()
                if getattr(error, "reason", None) in _BROKEN:
                    # Not if it is silent: a store that is only slow would be slower if all senders came again now.
                    context.signals.has_lost_log = True
                    context.signals.wake.set()
                self._connection.pause(error)
        self._connection.drop()
        context.connections.remove(self._connection)

    def _turn(self, store: JobStore) -> None:
        self._member_driver.run_store_tasks(store, self._connection.store_id)
        slot = self._member_driver.wait_slot(_MOMENT)
        if slot is None:
            return
        entry = wait_entry(store, slot, _LONGEST_WAIT)
        if entry is not None:
            self._member_driver.feed_from(self._connection.store_id, entry)
            self._member_driver.copy.keep(store, self._member_driver.member)
            self._context.signals.wake.set()  # the sender's first beat may be due, now that the job has a round
