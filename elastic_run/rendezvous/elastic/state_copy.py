"""The copy of the job's state that this node keeps, for a store that knows nothing of the job (`core.job.view_change`).

Rules
- Every node of a small job keeps a copy where the store can move; of a large job only those that may serve the store,
  since each copy is as long as the list of all nodes.
- An older copy of the same job never takes the place of a newer one: a log that was left may be come back to.
- The copy is made before the node acts on the decision beside it. Garbage never takes the place of a good copy.
- Equal copies have one key: a node that finds its copy in another store writes nothing there.
"""

from __future__ import annotations

import threading

from elastic_run.core.job.snapshot import identify
from elastic_run.core.protocol import job_keys
from elastic_run.core.protocol.codec import MessageError
from elastic_run.rendezvous.elastic.decision_log import get_document

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.node.state import Member
    from elastic_run.core.protocol.messages import Copy
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["StateCopy"]

#: Nodes of a round up to which each of them keeps a copy.
_SMALL = 64


class StateCopy:
    """One node's copy.

    Args:
        backend: The job's store.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._may_serve: bool | None = None
        self._kept = (-1, 0)
        self._document: bytes | None = None
        self._copy: Copy | None = None

    def keep(self, store: JobStore, member: Member) -> None:
        """Keep the newest state, if there is a newer one than before.

        Args:
            store: A connection to the store of the log that the member follows.
            member: The member's state on this node.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        newest = member.log.state_slot, member.log.state_term
        if not self._backend.successors or not member.job.has_view or newest in ((-1, 0), self._kept):
            return
        if member.round.place is not None and member.round.place.group_world_size > _SMALL and not self._serves_later:
            return
        document = get_document(store, job_keys.state_key(*newest))
        if document is None:
            return  # a newer one has taken its place: it comes with the next slot
        try:
            copy = identify(document)
        except MessageError:
            return
        with self._lock:
            self._kept = newest
            if not copy.is_older_than(self._copy):
                self._document, self._copy = document, copy

    def offer(self, store: JobStore) -> Copy | None:
        """Put the copy into a store.

        Args:
            store: A connection to it.

        Returns:
            Which copy it is, or None where this node has none.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        with self._lock:
            self._kept = (-1, 0)  # the log there has slots of its own
            copy, document = self._copy, self._document
        if copy is None or document is None:
            return None
        key = job_keys.copy_key(copy)
        if get_document(store, key) != document:
            store.write({key: document})
        return copy

    @property
    def _serves_later(self) -> bool:
        if self._may_serve is None:
            self._may_serve = self._backend.is_successor
        return self._may_serve
