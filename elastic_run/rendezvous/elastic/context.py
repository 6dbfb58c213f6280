"""What the threads of one session share: who this node is, how to reach the store, how to tell the agent."""

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

    from elastic_run.core.protocol.messages import JobConfig, NodeInfo, Offer
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.rendezvous.elastic.node_death.proofs import DeathProofs
    from elastic_run.rendezvous.session import SessionEvent
    from elastic_run.rendezvous.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionContext:
    """What the threads of one session share.

    Args:
        node: This run's id among the nodes of the job.
        node_info: Who it is.
        config: The job's configuration as it was told.
        settings: Of its rendezvous, beyond the configuration.
        backend: The job's store.
        local_addr: The address that others use, empty until it is known.
        death_proofs: This node's seat record, and the death_proofs that it can prove.
        shows_waiting: Whether the agent shows what is waited for in one line that it rewrites.
        offer: Where the next round's workers' store listens, as the agent said.
        member_driver: The node's member, None until the store was reached.
        store_id: The id of the store that the session lives with.
        failover_to: Where the store goes on, as its host said before it went; the sender goes there.
        formed_at: Monotonic seconds at which this node read that its last round was formed, None before the first.
        last_heartbeat_at: Monotonic seconds at which the last beat was sent that the store has confirmed.
        fenced_for: Seconds without such a beat after which the workers were stopped, 0.0 while they were not.
        is_leaving: Whether the agent said that it goes.
        closing: Set when the threads are to end.
        is_over: Set when the last event was delivered.
        wake: Wakes the sender.
        has_sent: Set whenever the store has confirmed what was to be said.
        has_failed_over: Set when the coordinator has told that the store moves.
        has_passed_exit_barrier: Whether the others know that this node knows the verdict.
        is_lost: Whether the store was given up.
        has_told_full: Whether the user knows that the store has no room for another connection of this node.
        deliver_to_agent: What the agent gave `start`.
        connections: The threads' connections.
    """

    node: str
    node_info: NodeInfo
    config: JobConfig
    settings: Settings
    backend: Backend
    local_addr: str
    death_proofs: DeathProofs
    shows_waiting: bool = False
    offer: Offer | None = None
    member_driver: MemberDriver | None = None
    store_id: bytes | None = None
    failover_to: str | None = None
    formed_at: float | None = None
    last_heartbeat_at: float = 0.0
    fenced_for: float = 0.0
    is_leaving: bool = False
    closing: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    has_sent: threading.Event = field(default_factory=threading.Event)
    has_failed_over: threading.Event = field(default_factory=threading.Event)
    has_passed_exit_barrier: bool = False
    is_lost: bool = False
    has_told_full: bool = False
    deliver_to_agent: Callable[[SessionEvent], None] = lambda _: None
    connections: list[StoreConnection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _events: deque[SessionEvent] = field(default_factory=deque)
    _is_delivering: bool = False

    @property
    def answer_timeout(self) -> float:
        """Seconds for the store to answer: short enough to try another connection within the lease."""
        settings = self.settings
        return max(1.0, min(settings.read_timeout, settings.heartbeat_timeout, self.config.lease / 2))

    def spawn(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a thread; a defect in it ends the session, instead of leaving the agent to wait for ever.

        Args:
            name: Its name.
            run: What it runs.

        Returns:
            The thread.
        """

        def guarded() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent is told
                _log.exception("a defect in the rendezvous, thread %s", name)
                self.deliver(Lost("internal_error", f"a defect in the rendezvous ({name}): {error!r}"))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def make_connection(self, expected_store_id: Callable[[], bytes | None] | None = None) -> StoreConnection:
        """Return a thread's connection, not yet open; `close` interrupts it.

        Args:
            expected_store_id: See `StoreConnection`.
        """
        connection = StoreConnection(
            self.backend,
            self.answer_timeout,
            self.closing,
            expected_store_id,
            longest_timeout=self.config.lease,
            on_full=self._tell_full,
        )
        self.connections.append(connection)
        return connection

    def _tell_full(self, text: str) -> None:
        """Tell the user once that a thread has no connection, since the store is full. The sender tells of its own."""
        if not self.has_told_full and self.member_driver is not None:
            self.has_told_full = True
            self.deliver(Notice(text))

    @property
    def open_connections(self) -> int:
        """The number of connections that this session has at the moment."""
        return sum(connection.is_open for connection in self.connections)

    @property
    def has_unsent(self) -> bool:
        """Whether there is something that the store has not confirmed, and may still confirm."""
        if self.member_driver is None or self.is_lost:
            return False
        is_silent = self.is_over.is_set() and not self.has_passed_exit_barrier
        return is_silent or self.member_driver.next_fact is not None

    def member_state(self) -> str | None:
        """Return the state of the node's member, None before the store was reached."""
        return None if self.member_driver is None else self.member_driver.member.state

    def deliver(self, event: SessionEvent) -> None:
        """Tell the agent, after what it was to be told before; one event at a time.

        Args:
            event: What has happened.
        """
        self.post(event)
        self.tell_agent()

    def post(self, event: SessionEvent) -> None:
        """Put an event in its place among those that the agent is to be told; `tell_agent` follows."""
        with self._lock:
            self._events.append(event)

    def tell_agent(self) -> None:
        """Tell the agent what was posted, unless another thread is at it: that one then tells this as well.

        No lock is held meanwhile, since the agent may answer at once.
        """
        while (event := self._take_event()) is not None:
            try:
                if isinstance(event, Ended | Refused | Lost):
                    self.is_lost = isinstance(event, Lost)
                    self.is_over.set()
                    self.wake.set()
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
