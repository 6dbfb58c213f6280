"""How a node that was cut off finds the others again, where the store can move.

The node may serve a store that no other node uses: the one that the others have left, or the one to which it went
alone. The majority rule keeps it from forming rounds there, and no node would ever come. So while it waits, it looks at
the job's other endpoints, and goes to the store whose job has come furthest. Of two equal stores, the node prefers the
one that the user named first, so that two waiting nodes don't change places for ever.

The node looks only after a lease in which the job in its own store came no further. Before that, other nodes may still
be on their way from a store that its host has not closed yet. Or they have just come, and the coordinator is about to
form a round of them.
"""

from __future__ import annotations

import time

from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import READY, RUNNING, WAITING
from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.codec import MessageError
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.store.jobstore.api import JobStore

    #: How far a job has come in a store; the greater, the further.
    Progress: TypeAlias = tuple[int, bool]

__all__ = ["PartitionRecovery"]

#: Seconds between two looks, and for one endpoint to answer.
_INTERVAL = 2.0
_ANSWER = 1.0
_NOTHING: Progress = (-1, False)


class PartitionRecovery:
    """One node's look-out for the others.

    Args:
        context: The data that the session's threads share.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._next_look = 0.0
        self._here: Progress | None = None  # while the node waits
        self._unchanged_since = 0.0

    def find_others(self, store: JobStore) -> str | None:
        """Look where the job has come further than here; may take a second for each other endpoint.

        Args:
            store: The store that this node lives with.

        Returns:
            The endpoint, as it was written, or None to stay.
        """
        backend, now = self._context.backend, time.monotonic()
        if not (backend.is_host and backend.others and self._is_waiting):
            self._here = None
            return None
        here = best = _read_progress(store)
        if here != self._here:
            self._here, self._unchanged_since = here, now
        if now < max(self._next_look, self._unchanged_since + self._context.config.lease):
            return None
        place = None
        for index, endpoint in enumerate(backend.others):
            if time.monotonic() - now > self._context.config.lease / 3:
                break  # this thread heartbeats, too
            there = self._look_at(endpoint)
            is_first = there == here and there != _NOTHING and index < backend.rank and place is None
            if there > best or is_first:
                best, place = there, endpoint
        self._next_look = time.monotonic() + _INTERVAL
        if place is None:
            return None
        self._here = None
        return format_endpoint(*place)

    @property
    def _is_waiting(self) -> bool:
        member_driver = self._context.sender.member_driver
        return member_driver is not None and member_driver.member.state in (WAITING, READY)

    def _look_at(self, endpoint: tuple[str, int]) -> Progress:
        try:
            with self._context.backend.look_at(endpoint, _ANSWER) as store:
                return _read_progress(store)
        except StoreError:
            return _NOTHING


def _read_progress(store: JobStore) -> Progress:
    raw = store.get([job_keys.HEAD])[0]
    if raw is None:
        return _NOTHING
    try:
        head = messages.read_head(raw)
    except MessageError:
        return _NOTHING
    return head.round, head.is_running


class Fence:
    """Watches over the heartbeats of one node.

    Args:
        context: The data that the session's threads share.
        member_driver: The node's member.
    """

    def __init__(self, context: SessionContext, member_driver: MemberDriver) -> None:
        self._context = context
        self._member_driver = member_driver

    def run(self) -> None:
        """Watch until the session ends."""
        context, lease = self._context, self._context.config.lease
        while not (context.signals.closing.is_set() or context.events.is_over.is_set()):
            now = time.monotonic()
            silent_for = now - context.sender.last_heartbeat_at
            if silent_for >= lease and self._member_driver.member.state == RUNNING:
                context.signals.fenced_at = now
                self._member_driver.feed(node_messages.CutOff(silent_for))
            pause = lease - silent_for if silent_for < lease else context.config.keep_alive_interval
            context.signals.closing.wait(pause)
