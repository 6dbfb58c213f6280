"""The thread that stops the workers of a node that is cut off, where the user asks for it (--fence-after=lease).

Rules
- Others take a node for lost a lease after the last beat that they could see. This thread counts from the moment at
  which that beat was sent, so it begins to stop the workers before the others begin a round without them. The workers
  have the shutdown timeout to end.
- It has a thread of its own: an attempt to reach the store may take as long as a lease.
- The node's round is over for it then. It says so as soon as it reaches its job again, and joins the next round.
"""

from __future__ import annotations

import time

from elastic_run.core.node import machine as member

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.rendezvous.elastic.membership import Membership

__all__ = ["Fence"]


class Fence:
    """Watches over the beats of one node.

    Args:
        affairs: What the session's threads share.
        membership: The node's member.
    """

    def __init__(self, affairs: Affairs, membership: Membership) -> None:
        self._affairs = affairs
        self._membership = membership

    def run(self) -> None:
        """Watch until the session ends."""
        affairs, lease = self._affairs, self._affairs.settings.lease
        while not (affairs.closing.is_set() or affairs.is_over.is_set()):
            silent_for = time.monotonic() - affairs.heard_at
            if silent_for >= lease:
                self._stop_workers(silent_for)
            affairs.closing.wait(lease - silent_for if silent_for < lease else affairs.settings.keep_alive_interval)

    def _stop_workers(self, silent_for: float) -> None:
        if self._membership.member.state == member.RUNNING:
            self._affairs.fenced_for = silent_for
            self._membership.feed(member.CutOff(silent_for))
