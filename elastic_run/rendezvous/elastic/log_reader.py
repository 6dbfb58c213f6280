"""The thread that follows the log of decisions: it blocks on the next slot and feeds what appears there.

It shares the sender's connection, where the store allows it, so a node has one connection. The log reader never opens
that connection: the sender does, since it chooses the store. Where both can't share one, as in etcd, it opens another
connection to the store that the sender has found.
"""

from __future__ import annotations

from elastic_run.rendezvous.elastic.decision_log import wait_entry
from elastic_run.store.errors import CLOSED, REFUSED, REPLACED, RESTORED, StoreAccessError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.rendezvous.elastic.store_connection import StoreConnection
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["LogReader"]

#: Seconds that one wait for a slot takes at most.
_LONGEST_WAIT = 30.0
#: Seconds to wait for the sender, which reads where the log stands.
_MOMENT = 0.5
#: Seconds before a store that refuses us is asked again; the sender, which is refused as well, tells the agent.
_REFUSED = 5.0
#: After these the sender looks at once whether the store is still there, and opens a shared connection again.
_BROKEN = (CLOSED, REFUSED, REPLACED, RESTORED)


class LogReader:
    """Follows the log for one node.

    Args:
        context: The data that the session's threads share.
        member_driver: The node's member.
        sender: The sender's connection.
    """

    def __init__(self, context: SessionContext, member_driver: MemberDriver, sender: StoreConnection) -> None:
        self._context = context
        self._member_driver = member_driver
        self._connection = context.make_connection(source=sender)
        self._sender = sender
        member_driver.wake_reader = self._interrupt

    def run(self) -> None:
        """Follow until the session ends or its last event came."""
        context = self._context
        while not (context.signals.closing.is_set() or context.events.is_over.is_set()):
            try:
                self._turn(self._connection.store)
            except StoreAccessError:
                self._connection.drop()
                context.signals.closing.wait(_REFUSED)
            except StoreError as error:
                self._connection.drop()
                is_broken = getattr(error, "reason", None) in _BROKEN
                if is_broken:
                    self._context.signals.check_store()
                self._connection.pause(error)
                # A store that is only slow would be slower if all senders came again at once.
                if self._connection.is_shared and not is_broken:
                    self._context.signals.check_store()
        self._connection.drop()
        context.connections.remove(self._connection)

    def _interrupt(self) -> None:
        """Wake the log reader from another thread; a shared connection is closed by its owner only."""
        (self._sender if self._connection.is_shared else self._connection).interrupt()

    def _turn(self, store: JobStore) -> None:
        self._member_driver.run_store_tasks(store, self._connection.store_id)
        slot = self._member_driver.wait_slot(_MOMENT)
        if slot is None:
            return
        try:
            entry = wait_entry(store, slot, _LONGEST_WAIT)
        finally:
            self._member_driver.end_wait()
        if entry is not None:
            self._member_driver.feed_from(self._connection.store_id, entry)
            self._member_driver.copy.keep(store, self._member_driver.member)
            self._context.signals.wake.set()  # the sender's first heartbeat may be due, now that the job has a round
