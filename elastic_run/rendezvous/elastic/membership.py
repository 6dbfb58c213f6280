"""The one `core.node.machine.Member` of a session, which several threads feed: one event at a time, commands in order.

Rules
- `feed` decides under a lock, and hands on what is for the agent or the coordinator's thread, in the order of the
  decisions. A callback may feed again; its commands come after those before it.
- What needs the store is left for whoever has a connection: facts for the speaker (`next_fact`), everything else as an
  errand for the first thread that comes by (`run_errands`). An errand whose connection broke goes back to the queue.
- What was read of a store that the session no longer lives with is dropped: the log there is another one.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from elastic_run.core.node import machine as core
from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.elastic import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from elastic_run.core.protocol.messages import Fact, Offer
    from elastic_run.rendezvous.elastic.copies import StateCopy
    from elastic_run.store.job_store import JobStore

    Errand: TypeAlias = core.ReadHead | core.CreateEntry | core.FetchAssignment | core.PrepareRejoin

__all__ = ["Membership"]


class Membership:
    """One node's member.

    Args:
        begun: From `core.node.machine.begin`.
        perform: Called with every command that is for the agent or the coordinator's thread, one at a time; it must
            not block.
        on_facts: Called when there are facts to append.
        copy: This node's copy of the job's state.
        renew_offer: Opens another workers' store of the next round, and returns where it listens; None where that is
            not for this node to choose.
        birth: The birth mark of the store.
    """

    def __init__(
        self,
        begun: core.Decision,
        *,
        perform: Callable[[core.Command], None],
        on_facts: Callable[[], None],
        copy: StateCopy,
        renew_offer: Callable[[], Offer | None],
        birth: bytes | None = None,
    ) -> None:
        self.copy = copy
        self._renew_offer = renew_offer
        self._birth = birth
        self._member, commands = begun
        self._perform = perform
        self._on_facts = on_facts
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._commands: deque[core.Command] = deque(commands)
        self._is_performing = False
        self._errands: deque[Errand] = deque()
        with self._lock:
            self._hand_on_all()

    def feed(self, event: core.Event) -> None:
        """Decide what follows an event, and hand the commands on.

        Args:
            event: What has happened.
        """
        with self._lock:
            self._member, commands = core.decide(self._member, event, time.monotonic())
            self._commands.extend(commands)
            self._hand_on_all()

    def feed_from(self, birth: bytes | None, event: core.Event) -> None:
        """Feed what was read of a store, unless that is no longer the job's.

        Args:
            birth: The birth mark of the store that it was read of.
            event: What was read.
        """
        with self._lock:
            if birth == self._birth:
                self.feed(event)

    def take_head(self, head: core.HeadRead) -> None:
        """Take in where the log stands, which was read on the way to the store: nobody need read it again.

        Args:
            head: What was read.
        """
        with self._lock:
            self._errands = deque(errand for errand in self._errands if not isinstance(errand, core.ReadHead))
            self.feed(head)

    def change_store(self, birth: bytes, *, serves_store: bool) -> None:
        """Go on in another store, which knows nothing of the job.

        Args:
            birth: Its birth mark.
            serves_store: Whether this node serves the store.
        """
        with self._lock:
            self._birth = birth
            self._errands.clear()
            self.feed(core.StoreChanged(serves_store=serves_store))

    def _hand_on_all(self) -> None:
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, core.ReadHead | core.CreateEntry | core.FetchAssignment | core.PrepareRejoin):
                    self._errands.append(command)
                elif isinstance(command, core.Append):
                    self._on_facts()
                else:
                    self._perform(command)
        finally:
            self._is_performing = False
            self._changed.notify_all()

    # --- what needs the store ------------------------------------------------------------------------------------
    @property
    def member(self) -> core.Member:
        """What the node knows now."""
        return self._member

    @property
    def next_fact(self) -> Fact | None:
        """The first fact that the store has not confirmed, or None."""
        outstanding = self._member.outstanding
        return outstanding[0] if outstanding else None

    def wait_slot(self, timeout: float) -> int | None:
        """Wait until it is known which slot of the log comes next.

        Args:
            timeout: Seconds.

        Returns:
            The slot, or None when it did not become known in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._member.next_slot is not None, timeout)
            return self._member.next_slot

    def run_errands(self, store: JobStore, birth: bytes | None) -> None:
        """Do what the member wants of the store, by a connection of the calling thread.

        Args:
            store: The connection.
            birth: The birth mark of the store that it leads to.

        Raises:
            StoreConnectionError: It broke; what was not done is left for another.
        """
        while (errand := self._take_errand(birth)) is not None:
            try:
                event = self._run(store, errand)
            except BaseException:
                with self._lock:
                    if birth == self._birth:
                        self._errands.appendleft(errand)
                raise
            self.feed_from(birth, event)

    def _take_errand(self, birth: bytes | None) -> Errand | None:
        with self._lock:
            return self._errands.popleft() if self._errands and birth == self._birth else None

    def _run(self, store: JobStore, errand: Errand) -> core.Event:
        if isinstance(errand, core.CreateEntry):
            return log.create_entry(store, errand.slot, errand.claim)
        if isinstance(errand, core.FetchAssignment):
            self.copy.keep(store, self._member)
            key = job_keys.assignment_key(errand.slot, errand.term, self._member.node)
            return core.AssignmentRead(errand.slot, errand.term, log.get_document(store, key))
        if isinstance(errand, core.PrepareRejoin):
            is_idle = self._member.state in (core.BEGINNING, core.WAITING, core.READY)
            return core.RejoinPrepared(self.copy.offer(store), self._renew_offer() if is_idle else None)
        return log.read_head(store)
