"""What the agent sees of its job's coordination: one `NodeThread`, and while it coordinates one `CoordinatorThread`."""

# ruff: noqa: D102 - Session says what the methods promise
from __future__ import annotations

import threading
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.core.job.node_events import Ended, Leaving, Refused, WorkersFailing, WorkersGone
from elastic_run.core.protocol.outcomes import UNHEALTHY
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.node_thread import NodeDescription, NodeThread
from elastic_run.rendezvous.session import Lost, Notice, Session
from elastic_run.store.tcpstore.worker_store import WorkerStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.facts import NodeEnds, StoreAddress
    from elastic_run.loop import Loop
    from elastic_run.rendezvous.coordination.coordinator_thread import CoordinatorThread
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.session import SessionEvent, Setup

__all__ = ["CoordinatedSession"]

#: Seconds for the threads to end, and for a node that was told to go to say so.
_WAIT_LIMIT = 5.0
_LEAVE_TIME = 1.0
#: Seconds for the other nodes of a coordinator that goes to hang up, or for one of them to coordinate.
_HANG_UP = 3.0
#: Seconds for nodes to come that are to learn why an unhealthy node, which serves the endpoint, takes no part.
_LATE_NODES = 30.0


class CoordinatedSession(Session):
    """One agent's membership of one job; see `NodeDescription` for the values."""

    def __init__(
        self,
        node: str,
        place: Place,
        setup: Setup,
        config: JobConfig,
        *,
        local_addr: str,
        describe_join: Callable[[str, int], str] | None,
    ) -> None:
        self.node = node
        self.offers_store = not place.serves_workers
        if place.serves_workers and place.own:
            self.worker_store = SharedWorkerStore(*place.endpoints[place.own])
        worker_host = "" if self.worker_store is None else self.worker_store.host
        self._description = NodeDescription(
            node, place, setup, config, local_addr, self.offers_store, worker_host, describe_join
        )
        self._place = place
        self._hold: Callable[[int], None] = lambda _: None
        self._thread: NodeThread | None = None
        self._end: SessionEvent | None = None
        self._leaving: Leaving | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._deliver_to_agent: Callable[[SessionEvent], None] = lambda _: None

    @property
    def local_addr(self) -> str:
        return self._description.local_addr if self._thread is None else self._thread.local_addr

    @property
    def listening_host(self) -> str:
        return "" if self._thread is None else self._thread.listening_host

    # --- what the agent says -----------------------------------------------------------------------------------------
    def hold_connections_with(self, hold: Callable[[int], None]) -> None:
        self._hold = hold
        if self._thread is not None:
            self._thread.hold_with(hold)

    def start(self, open_worker_store: Callable[[str], StoreAddress], deliver: Callable[[SessionEvent], None]) -> None:
        self._deliver_to_agent = deliver
        self._thread = NodeThread(
            self._description, deliver=self._deliver, open_worker_store=open_worker_store, hold=self._hold
        )
        self._thread.start(self._leaving)  # an unhealthy node comes to say why it goes

    def _deliver(self, event: SessionEvent) -> None:
        if isinstance(event, Ended | Refused | Lost):
            self._end = event
        if isinstance(event, Refused):
            event = replace(event, detail=event.detail + self._describe_going())
        self._deliver_to_agent(event)

    def _describe_going(self) -> str:
        """Say what becomes of the job when this node, which was refused, goes; "" where it doesn't coordinate."""
        thread = self._thread
        is_coordinator = thread is not None and thread.coordinator is not None and thread.coordinator.has_others
        if not is_coordinator or not self._place.dies_with_host:
            return ""
        successors = self._place.successors
        if not successors:
            return "; this node serves the job's store: the job of the other nodes ends with it"
        return f"; this node serves the job's store: the store moves to {successors[0]}"

    def report_failing(self, round: int, *, is_secondary: bool = False) -> None:  # noqa: A002 - the events' word
        if self._thread is not None:
            self._thread.feed(WorkersFailing(round, is_secondary))

    def report_ready(
        self,
        round: int,  # noqa: A002 - the events' word
        outcome: str,
        *,
        report: Mapping[str, Any] | None,
        store_address: StoreAddress,
        detail: str = "",
        verdict: str = "",
        ends: NodeEnds | None = None,
    ) -> None:
        if self._thread is not None:
            document = None if report is None else dict(report)
            address = self._thread.renew_store(store_address)
            self._thread.feed(
                WorkersGone(round, outcome, address, report=document, verdict=verdict, detail=detail, ends=ends)
            )

    def leave(self, reason: str, detail: str = "") -> None:
        self._leaving = Leaving(reason, detail)
        if self._thread is not None:
            self._thread.feed(self._leaving)

    # --- the state of all nodes, where somebody asks -----------------------------------------------------------------
    @property
    def has_place(self) -> bool:
        member = None if self._thread is None else self._thread.member
        return member is not None and member.place is not None

    def tell_status(self, document: Mapping[str, Any], question: str) -> None:
        if self._thread is not None:
            self._thread.tell_status(dict(document), question)

    def gather_status(self, question: str, wait_limit: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        if self._thread is None:
            deliver([])
        else:
            self._thread.gather_status(question, wait_limit, deliver)

    def list_left_out(self) -> list[dict[str, Any]]:
        coordinator = None if self._thread is None else self._thread.coordinator
        return [] if coordinator is None else coordinator.list_left_out()

    def describe_wait(self) -> str:
        return "" if self._thread is None else self._thread.notices.described

    # --- the end -----------------------------------------------------------------------------------------------------
    def close(self, timeout: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        thread = self._thread
        if thread is None:
            self._place.close()
            return
        is_unhealthy = self._leaving is not None and self._leaving.reason == UNHEALTHY
        deadline = time.monotonic() + (_LATE_NODES if is_unhealthy else timeout)
        if not isinstance(self._end, Lost):
            lease = self._description.config.lease
            thread.wait_said(deadline - time.monotonic() if is_unhealthy else min(timeout, _LEAVE_TIME, lease))
        coordinator = thread.coordinator
        if coordinator is not None:
            if isinstance(self._end, Ended):
                coordinator.wait_known(max(0.0, deadline - time.monotonic()))
            elif is_unhealthy and self._place.dies_with_host and self._is_needed(thread):
                self._stay(coordinator, deadline)
            elif self._leaving is not None or isinstance(self._end, Refused):
                self._go(thread, coordinator, max(0.0, deadline - time.monotonic()))
        thread.close(_WAIT_LIMIT)
        if coordinator is not None:
            coordinator.close()
            self._release(is_over=isinstance(self._end, Ended))
        self._place.close()

    def _release(self, *, is_over: bool) -> None:
        """Give up what this agent holds of the place; a store that does not answer holds up nobody for long."""
        release = threading.Thread(target=lambda: self._place.release(is_over=is_over), name="release", daemon=True)
        release.start()
        release.join(_WAIT_LIMIT if is_over else _LEAVE_TIME)

    def _go(self, thread: NodeThread, coordinator: CoordinatorThread, timeout: float) -> None:
        """Leave the coordination to another agent, or end the job where there is none."""
        if not coordinator.has_others:
            return
        if self._place.successors or not self._place.dies_with_host:
            if coordinator.has_heirs:
                self._release(is_over=False)
                thread.wait_said(min(timeout, _HANG_UP), hands_over=True)
        else:
            host, name = self._description.setup.node_info.host, self._place.name
            why = "was not taken into the job" if isinstance(self._end, Refused) else "was told to stop"
            detail = (
                f"the node that served the store at {name} ({host}) {why}, and the job ends with it: the endpoint "
                "lists no successor (--rdzv-endpoint=a,b,c)"
            )
            self._deliver_to_agent(Notice("this node serves the job's store: the job ends with it"))
            coordinator.end_job(detail)
            coordinator.wait_empty(min(timeout, _HANG_UP))

    def _is_needed(self, thread: NodeThread) -> bool:
        """Whether no other agent can coordinate, or none may have started yet."""
        is_awaited = thread.member is None or thread.member.started is None
        return not self._place.successors or (is_awaited and self._description.describe_join is None)

    def _stay(self, coordinator: CoordinatorThread, come_by: float) -> None:
        """Coordinate without workers until no other node is connected."""
        left = come_by - time.monotonic()
        if not coordinator.has_others:
            if self._description.describe_join is not None or left <= 0:
                return
            why = "so that new nodes learn why it has left the job"
            text = f"this node serves the job's store for {left:.0f} s more, {why}"
            self._deliver_to_agent(Notice(text))
            if not coordinator.wait_others(left):
                return
        text = (
            "this node serves the job's store, so it stays without workers until the other nodes have ended; a signal "
            "ends it, and the job with it"
        )
        self._deliver_to_agent(Notice(text))
        coordinator.wait_empty(LONGEST_WAIT)


class SharedWorkerStore(WorkerStore):
    """The workers' store at the port at which rank 0's agent coordinates.

    Args:
        host: MASTER_ADDR of the workers.
        port: MASTER_PORT.
    """

    use_agent_store = True

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def serve(self, loop: Loop) -> None:
        """Nothing to do: the coordinator's thread serves it."""

    def renew(self) -> WorkerStore:
        """Return this same store: its port is fixed, and the coordinator empties it before each round."""
        return self

    def close(self) -> None:
        """Nothing to do: the port belongs to the coordination as well."""
