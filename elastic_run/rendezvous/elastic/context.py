"""The data that the threads of one session share: the node's identity, the agent's events, signals between threads.

- `SessionContext` itself is frozen: it identifies the node. Data that changes is in its parts; each has one owner.
- `SenderState` belongs to the sender; other threads only read it.
- `SessionSignals` pass from one thread to another; each has a reader that waits for it or looks.
- `EventQueue` brings the events of all threads to the agent, in order.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from elastic_run.core.node.messages import Ended, Refused
from elastic_run.records import dataclass, field
from elastic_run.rendezvous.elastic.store_connection import StoreConnection
from elastic_run.rendezvous.session import Lost, Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.node.config import NodeConfig
    from elastic_run.core.protocol.messages import NodeInfo
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.rendezvous.elastic.node_death.proofs import DeathProofs
    from elastic_run.rendezvous.elastic.status_exchange import StatusAnswers
    from elastic_run.rendezvous.session import SessionEvent
    from elastic_run.rendezvous.settings import Settings

_log = logging.getLogger(__name__)


class EventQueue:
    """The events for the agent: told one at a time, in the order in which they were put in.

    Args:
        on_end: Called when the last event is told.

    Attributes:
        deliver_to_agent: The function that the agent gave to `start`.
        is_over: Set when the last event is told.
        is_lost: Whether the last event says that the store was given up.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.deliver_to_agent: Callable[[SessionEvent], None] = lambda _: None
        self.is_over = threading.Event()
        self.is_lost = False
        self._on_end = on_end
        self._lock = threading.Lock()
        self._events: deque[SessionEvent] = deque()
        self._is_delivering = False

    def deliver(self, event: SessionEvent) -> None:
        """Give the agent an event, after all events that were posted before."""
        self.post(event)
        self.tell_agent()

    def post(self, event: SessionEvent) -> None:
        """Queue an event for the agent; the caller calls `tell_agent` next."""
        with self._lock:
            self._events.append(event)

    def tell_agent(self) -> None:
        """Give the agent the queued events. If another thread is doing so, that thread gives these events as well.

        No lock is held while the agent takes an event, since the agent may answer at once.
        """
        while (event := self._take_event()) is not None:
            try:
                if isinstance(event, Ended | Refused | Lost):
                    self.is_lost = isinstance(event, Lost)
                    self.is_over.set()
                    self._on_end()
                self.deliver_to_agent(event)
            finally:
                with self._lock:
                    self._is_delivering = False

    def _take_event(self) -> SessionEvent | None:
        with self._lock:
            if self._is_delivering or not self._events or self.is_over.is_set():
                return None
            self._is_delivering = True
            return self._events.popleft()


@dataclass(slots=True)
class SenderState:
    """The state of the store as the sender knows it; other threads only read it.

    Args:
        local_addr: The address that other nodes use for this node, "" until it is known.
        member_driver: The node's member, None until the store was reached.
        store_id: The id of the store that the session uses.
        restores: How often that store was restored from a backup, and the session went on in it.
        last_heartbeat_at: Monotonic seconds at which the last heartbeat was sent that the store has confirmed.
        has_passed_exit_barrier: Whether the others know that this node knows the verdict.
    """

    local_addr: str = ""
    member_driver: MemberDriver | None = None
    store_id: bytes | None = None
    restores: int = 0
    last_heartbeat_at: float = 0.0
    has_passed_exit_barrier: bool = False


@dataclass(slots=True)
class SessionSignals:
    """The messages between the threads of one session: for each, which thread sets it and which thread reads it.

    A plain field has one thread that writes it. An event (`threading.Event`) may have several; the thread that waits
    for it clears it, before it looks at what the event tells of. So nothing that happens meanwhile is missed.

    *The member's thread* is the thread that performs the member's command: as a rule the log reader, which brings the
    member its decisions. *The closing thread* runs `JobSession.close`.

    Args:
        closing: The session ends. The closing thread sets it; all threads read it.
        is_leaving: The agent leaves the job. The agent's thread sets it, once; all threads read it.
        is_unhealthy: It leaves since its node is unhealthy; set and read in the same way.
        wake: The sender has something to do. Every thread sets it; the sender clears it.
        has_sent: The store has confirmed all facts. The sender sets it; the closing thread waits for it and clears it.
        has_failed_over: A decision to move the store was read, or no other node uses this node's store any more. The
            member's thread sets it, or the store's; the closing thread waits for it.
        has_lost_log: The log reader's connection has broken, the coordinator's leads to another store, or this node's
            heartbeat is gone. The threads that find it set it; the sender clears it, and checks the store.
        failovers: The endpoints to which the store moves. The member's thread appends one; the sender takes it, and
            goes there.
        formed_at: Monotonic seconds at which this node read that its last round was formed, or None. The member's
            thread sets it; the sender reads it.
        fenced_at: Monotonic seconds at which the fence stopped the workers last, or 0.0. The fence sets it; the sender
            reads it. A later heartbeat (`SenderState.last_heartbeat_at`) makes it void.
        has_told_full: Whether the user knows that the store has no room for another connection of this node. The first
            thread that is refused sets it. If two threads are refused in one moment, the user may be told twice.
    """

    closing: threading.Event = field(default_factory=threading.Event)
    is_leaving: bool = False
    is_unhealthy: bool = False
    wake: threading.Event = field(default_factory=threading.Event)
    has_sent: threading.Event = field(default_factory=threading.Event)
    has_failed_over: threading.Event = field(default_factory=threading.Event)
    has_lost_log: threading.Event = field(default_factory=threading.Event)
    failovers: deque[str] = field(default_factory=deque)
    formed_at: float | None = None
    fenced_at: float = 0.0
    has_told_full: bool = False

    def check_store(self) -> None:
        """Let the sender look whether its store is still there."""
        self.has_lost_log.set()
        self.wake.set()


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The data that the threads of one session share.

    Args:
        node: This run's id among the nodes of the job.
        node_info: This node's description for the other nodes.
        config: The job's configuration, as this node's user gave it.
        node_config: The settings of this node.
        settings: The settings of the rendezvous that are not in the configuration.
        backend: The job's store.
        death_proofs: This node's seat record, and the deaths that it can prove.
        shows_waiting: Whether the agent shows the missing nodes in one line that it rewrites.
        sender: The state of the store as the sender knows it.
        signals: Signals between the threads.
        events: Events for the agent.
        status_answers: This node's answers to questions that a node asks all nodes.
        connections: The threads' connections.
    """

    node: str
    node_info: NodeInfo
    config: JobConfig
    node_config: NodeConfig
    settings: Settings
    backend: Backend
    death_proofs: DeathProofs
    shows_waiting: bool
    sender: SenderState
    signals: SessionSignals
    events: EventQueue
    status_answers: StatusAnswers
    connections: list[StoreConnection] = field(default_factory=list)

    @property
    def answer_timeout(self) -> float:
        """Seconds for the store to answer: short enough to try another connection within the lease."""
        settings = self.settings
        return max(1.0, min(settings.read_timeout, settings.heartbeat_timeout, self.config.lease / 2))

    def spawn(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a thread; a defect in it ends the session, instead of leaving the agent to wait for ever."""

        def guarded() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent is told
                _log.exception("a defect in the rendezvous, thread %s", name)
                self.events.deliver(Lost("internal_error", f"a defect in the rendezvous ({name}): {error!r}"))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def make_connection(
        self,
        expected_store_id: Callable[[], bytes | None] | None = None,
        source: StoreConnection | None = None,
    ) -> StoreConnection:
        """Return a thread's connection, not yet open; `close` interrupts it.

        Args:
            expected_store_id: See `StoreConnection`.
            source: See there, too.
        """
        connection = StoreConnection(
            self.backend,
            self.answer_timeout,
            self.signals.closing,
            expected_store_id,
            source=source,
            longest_timeout=self.config.lease,
            on_full=self._tell_full,
        )
        connection.expected_restores = lambda: self.sender.restores
        self.connections.append(connection)
        return connection

    def _tell_full(self, text: str) -> None:
        """Tell the user once that a thread has no connection, since the store is full. The sender tells of its own."""
        if not self.signals.has_told_full and self.sender.member_driver is not None:
            self.signals.has_told_full = True
            self.events.deliver(Notice(text))

    def count_connections(self) -> int:
        """Return the number of connections that this session has at the moment."""
        return sum(connection.is_open for connection in tuple(self.connections))

    @property
    def has_unsent(self) -> bool:
        """Whether there is something that the store has not confirmed, and may still confirm."""
        if self.sender.member_driver is None or self.events.is_lost:
            return False
        is_silent = self.events.is_over.is_set() and not self.sender.has_passed_exit_barrier
        return is_silent or self.sender.member_driver.next_fact is not None

    def member_state(self) -> str | None:
        """Return the state of the node's member, None before the store was reached."""
        return None if self.sender.member_driver is None else self.sender.member_driver.member.state
