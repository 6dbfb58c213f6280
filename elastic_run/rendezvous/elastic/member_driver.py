"""The one `core.node.machine.Member` of a session, which several threads feed: one event at a time, commands in order.

Rules
- `feed` decides under a lock, and hands on what is for the agent or the coordinator's thread, in the order of the
  decisions. A callback may feed again; its commands come after those before it.
- Work that needs the store waits for a thread with a connection: facts for the sender (`next_fact`), everything else as
  a task for the first thread that asks (`run_store_tasks`). A task whose connection broke goes back to the queue.
- Anything that was read from a store that the session has left is dropped: the log there is another one.
- If `head` leads the node on to another slot, the log reader is woken: the slot that it waits for may never be written.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from elastic_run.core.node import machine as core
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import BEGINNING, READY, WAITING, Member
from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.elastic import decision_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from elastic_run.core.protocol.messages import Fact, StoreAddress
    from elastic_run.rendezvous.elastic.state_copy import StateCopy
    from elastic_run.store.jobstore.api import JobStore

    StoreTask: TypeAlias = (
        node_messages.ReadHead
        | node_messages.CreateEntry
        | node_messages.FetchAssignment
        | node_messages.PrepareRejoin
        | node_messages.KeepState
    )

__all__ = ["MemberDriver"]

_STORE_TASKS = (
    node_messages.ReadHead,
    node_messages.CreateEntry,
    node_messages.FetchAssignment,
    node_messages.PrepareRejoin,
    node_messages.KeepState,
)


class MemberDriver:
    """One node's member.

    Args:
        begun: From `core.node.machine.begin`.
        perform: Called with every command that is for the agent or the coordinator's thread, one at a time; it must
            not block.
        on_facts: Called when there are facts to append.
        copy: This node's copy of the job's state.
        renew_worker_store: Opens another workers' store of the next round, and returns where it listens; None where
            that is not for this node to choose.
        store_id: The id of the store.
    """

    def __init__(
        self,
        begun: core.Decision,
        *,
        perform: Callable[[node_messages.Command], None],
        on_facts: Callable[[], None],
        copy: StateCopy,
        renew_worker_store: Callable[[], StoreAddress | None],
        store_id: bytes | None = None,
    ) -> None:
        self.copy = copy
        self._renew_worker_store = renew_worker_store
        self._store_id = store_id
        self._member, commands = begun
        self._perform = perform
        self._on_facts = on_facts
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._commands: deque[node_messages.Command] = deque(commands)
        self._is_performing = False
        self.wake_reader: Callable[[], None] = lambda: None
        self._awaited: int | None = None
        self._tasks: deque[StoreTask] = deque()
        with self._lock:
            self._hand_on_all()

    def feed(self, event: node_messages.Event) -> None:
        """Decide what follows an event, and hand the commands on."""
        with self._lock:
            self._member, commands = core.decide(self._member, event, time.monotonic())
            self._commands.extend(commands)
            self._hand_on_all()
            if isinstance(event, node_messages.HeadRead) and self._awaited not in (None, self._member.log.next_slot):
                self._awaited = None
                self.wake_reader()

    def feed_from(self, store_id: bytes | None, event: node_messages.Event) -> None:
        """Feed what was read of a store, unless that is no longer the job's.

        Args:
            store_id: The id of the store that it was read of.
            event: What was read.
        """
        with self._lock:
            if store_id == self._store_id:
                self.feed(event)

    def take_head(self, head: node_messages.HeadRead) -> None:
        """Take in where the log stands, which was read on the way to the store: nobody need read it again."""
        with self._lock:
            self._tasks = deque(task for task in self._tasks if not isinstance(task, node_messages.ReadHead))
            self.feed(head)

    def change_store(self, store_id: bytes, *, serves_store: bool) -> None:
        """Go on in another store, which knows nothing of the job."""
        with self._lock:
            self._store_id = store_id
            self._tasks.clear()
            self.feed(node_messages.StoreChanged(serves_store=serves_store))

    def _hand_on_all(self) -> None:
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, _STORE_TASKS):
                    self._tasks.append(command)
                elif isinstance(command, node_messages.Append):
                    self._on_facts()
                else:
                    self._perform(command)
        finally:
            self._is_performing = False
            self._changed.notify_all()

    # --- what needs the store ------------------------------------------------------------------------------------
    @property
    def member(self) -> Member:
        """What the node knows now."""
        return self._member

    @property
    def next_fact(self) -> Fact | None:
        """The first fact that the store has not confirmed, or None."""
        outstanding = self._member.facts.outstanding
        return outstanding[0] if outstanding else None

    def wait_slot(self, timeout: float) -> int | None:
        """Wait until it is known which slot of the log comes next.

        Args:
            timeout: Seconds.

        Returns:
            The slot, or None when it did not become known in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._member.log.next_slot is not None, timeout)
            self._awaited = self._member.log.next_slot
            return self._awaited

    def end_wait(self) -> None:
        """Note that the log reader waits for no slot."""
        self._awaited = None

    def run_store_tasks(self, store: JobStore, store_id: bytes | None) -> None:
        """Do what the member wants of the store, by a connection of the calling thread.

        Args:
            store: The connection.
            store_id: The id of the store that it leads to.

        Raises:
            StoreConnectionError: It broke; what was not done is left for another.
        """
        while (task := self._take_task(store_id)) is not None:
            try:
                event = self._run(store, task)
            except BaseException:
                with self._lock:
                    if store_id == self._store_id:
                        self._tasks.appendleft(task)
                raise
            self.feed_from(store_id, event)

    def _take_task(self, store_id: bytes | None) -> StoreTask | None:
        with self._lock:
            return self._tasks.popleft() if self._tasks and store_id == self._store_id else None

    def _run(self, store: JobStore, task: StoreTask) -> node_messages.Event:
        if isinstance(task, node_messages.CreateEntry):
            return decision_log.create_entry(store, task.slot, task.claim)
        if isinstance(task, node_messages.FetchAssignment):
            self.copy.keep(store, self._member)
            key = job_keys.assignment_key(task.slot, task.term, self._member.node)
            return node_messages.AssignmentRead(task.slot, task.term, decision_log.get_document(store, key))
        if isinstance(task, node_messages.KeepState):
            self.copy.keep(store, self._member)
            return node_messages.StateKept(task.prepared)
        if isinstance(task, node_messages.PrepareRejoin):
            is_idle = self._member.state in (BEGINNING, WAITING, READY)
            copy = self.copy.offer(store) if task.needs_copy else self._member.job.copy
            return node_messages.RejoinPrepared(copy, self._renew_worker_store() if is_idle else None)
        return decision_log.read_head(store)
