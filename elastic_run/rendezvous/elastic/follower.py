"""The thread that follows the log of decisions: it blocks on the next slot and feeds what appears there.

In another store another follower begins. This one may be on its way to a machine that is dark, which nothing can
interrupt, and the round would have to wait for it.
"""

from __future__ import annotations

from elastic_run.rendezvous.elastic.log import wait_entry
from elastic_run.store.errors import StoreAccessError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.rendezvous.elastic.membership import Membership
    from elastic_run.store.job_store import JobStore

__all__ = ["Follower"]

#: Seconds that one wait for a slot takes at most.
_LONGEST_WAIT = 30.0
#: Seconds to wait for the speaker, which reads where the log stands.
_MOMENT = 0.5
#: Seconds before a store that refuses us is asked again; the speaker, which is refused as well, tells the agent.
_REFUSED = 5.0


class Follower:
    """Follows the log for one node.

    Args:
        affairs: What the session's threads share.
        membership: The node's member.
    """

    def __init__(self, affairs: Affairs, membership: Membership) -> None:
        self._affairs = affairs
        self._membership = membership
        self._link = affairs.make_link(lambda: affairs.birth)
        self._is_abandoned = False

    def abandon(self) -> None:
        """End as soon as the thread can: another follows the log from now on."""
        self._is_abandoned = True
        self._link.interrupt()

    def run(self) -> None:
        """Follow until the session ends or its last event came, or another does."""
        affairs = self._affairs
        while not (self._is_abandoned or affairs.closing.is_set() or affairs.is_over.is_set()):
            try:
                self._turn(self._link.store)
            except StoreAccessError:
                self._link.drop()
                affairs.closing.wait(_REFUSED)
            except StoreError as error:
                self._link.drop()
                self._link.pause(error)
        self._link.drop()
        affairs.links.remove(self._link)

    def _turn(self, store: JobStore) -> None:
        self._membership.run_errands(store, self._link.birth)
        slot = self._membership.wait_slot(_MOMENT)
        if slot is None:
            return
        entry = wait_entry(store, slot, _LONGEST_WAIT)
        if entry is not None:
            self._membership.feed_from(self._link.birth, entry)
            self._membership.copy.keep(store, self._membership.member)
