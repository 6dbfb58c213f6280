"""What an agent sees of its job of several nodes, from the first join to the end; all may be called from any thread.

A thread with a loop has this agent's `Node`, which finds the job's coordinator and obeys it; while this agent
coordinates, its `Coordinator` has another one. Neither waits for the agent, and the agent waits for them in `close`.
"""

from __future__ import annotations

import os
import threading
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.core.job.codec import from_document, to_message
from elastic_run.core.job.documents import NodeState, RoundEnd, StoreAddress
from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.core.job.membership import Ended, Leaving, Refused, WorkersFailing, WorkersGone
from elastic_run.core.job.restart_policy import UNHEALTHY
from elastic_run.core.job.short_lists import list_hosts
from elastic_run.loop import Loop
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.node import Node
from elastic_run.rendezvous.events import Lost, Notice
from elastic_run.store.worker_store import WorkerStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.core.job import membership
    from elastic_run.core.job.documents import NodeEnds
    from elastic_run.rendezvous.coordination.coordinator import Coordinator
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.events import SessionEvent, Setup
    from elastic_run.rendezvous.settings import Settings

#: Seconds for the thread to end, and for a node that was told to go to say so.
_WAIT_LIMIT = 5.0
_LEAVE_TIME = 1.0
#: Seconds for the other nodes of a coordinator that goes to hang up, or for one of them to coordinate.
_HANG_UP = 3.0
#: Seconds after which the end of a job tells that it waits for nodes that don't know it.
_MOMENT = 1.0
#: Seconds for nodes to come that are to learn why an unhealthy node, which serves the endpoint, takes no part.
_LATE_NODES = 30.0


class Session:
    """One agent's membership of one job; ValueError if the other nodes could not read a value of this node.

    `local_addr` is the address at which others reach this node, "" to find out. `describe_join` says how others join at
    a host and a port; None where they know.
    """

    def __init__(
        self,
        place: Place,
        settings: Settings,
        setup: Setup,
        *,
        local_addr: str = "",
        describe_join: Callable[[str, int], str] | None = None,
    ) -> None:
        config = settings.complete(replace(setup.job_config, has_successors=place.choice != ONLY_ONE))
        try:
            from_document(NodeState, to_message(NodeState("", setup.node_info, config, StoreAddress("", 0))))
        except ValueError as error:
            message = f"the other nodes could not read a value of this node: {error}"
            raise ValueError(message) from None
        #: This run's id among the nodes of the job.
        self.node = f"{setup.node_info.host}_{setup.node_info.pid}_{os.urandom(4).hex()}"
        #: Whether the agent opens a workers' store for each round at all; with static only rank 0 has one.
        self.offers_store = not place.serves_workers
        has_port = place.serves_workers and bool(place.own)
        #: The workers' store, where the rendezvous has one port for both (static, on rank 0): the agent opens none.
        self.worker_store = _SharedWorkerStore(*place.endpoints[place.own]) if has_port else None
        self._place = place
        self._is_announced = describe_join is not None
        self._lease = config.lease
        self._loop = Loop()
        self._node = Node(
            self._loop,
            self.node,
            place,
            setup,
            config,
            local_addr=local_addr,
            describe_join=describe_join,
            deliver=self._deliver,
        )
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._is_started = self._is_closed = self._is_over = False
        self._end: SessionEvent | None = None
        self._leaving: Leaving | None = None
        self._lock = threading.Lock()
        self._deliver_to_agent: Callable[[SessionEvent], None] = lambda _: None

    @property
    def listening_host(self) -> str:
        """The numeric address at which this node's workers' stores listen; empty for all interfaces."""
        return self._node.listening_host

    @property
    def coordinator(self) -> Coordinator | None:
        """This agent's port and its coordination, or None."""
        return self._node.search.coordinator

    # --- what the agent says; none of it blocks -----------------------------------------------------------------------
    def start(self, open_worker_store: Callable[[str], StoreAddress], deliver: Callable[[SessionEvent], None]) -> None:
        """Join the job; a node that was told to leave before comes to say why it goes.

        The session's thread calls both: `open_worker_store` when the job was reached, to open this node's workers'
        store of the first round at a `listening_host` (it may raise OSError), and `deliver`, which must not block, with
        each event. An empty host in the store's address, or a wildcard, stands for this node's own.
        """
        self._deliver_to_agent = deliver
        self._node.open_worker_store = open_worker_store
        self._is_started = True
        self._loop.call_soon_threadsafe(self._node.search.begin)  # after `leave`, so that no sick node asks others in
        self._thread.start()

    def hold_connections_with(self, hold: Callable[[int], None]) -> None:
        """Let the guardian hold this node's connections to its job as well: `hold` takes a duplicate of each."""
        self._loop.call_soon_threadsafe(lambda: self._node.hold_with(hold))

    def report_failing(self, number: int, *, is_secondary: bool = False) -> None:
        """Say that a worker of the round has failed, before the others are stopped; see `WorkersFailing`."""
        self._feed(WorkersFailing(number, is_secondary))

    def report_ready(
        self,
        number: int,
        outcome: str,
        *,
        report: Mapping[str, Any] | None,
        store_address: StoreAddress,
        detail: str = "",
        verdict: str = "",
        ends: NodeEnds | None = None,
    ) -> None:
        """Say that no process of the round lives any more on this node; see `documents.RoundEnd`."""
        document = None if report is None else dict(report)
        address = self._node.complete(store_address)
        self._feed(WorkersGone(number, RoundEnd(outcome, document, verdict, detail, ends), address))

    def leave(self, reason: str, detail: str = "") -> None:
        """Say that this node goes, for a reason of `core.job.restart_policy`; `close` waits until it was heard."""
        self._leaving = Leaving(reason, detail)
        self._feed(self._leaving)

    def _feed(self, event: membership.Event) -> None:
        self._loop.call_soon_threadsafe(lambda: self._node.feed(event))

    # --- the state of all nodes, where somebody asks -----------------------------------------------------------------
    @property
    def has_place(self) -> bool:
        """Whether this node runs a round, or was in the job's last one; not if the job went on without it."""
        member = self._node.member
        return member is not None and member.place is not None

    def tell_status(self, document: Mapping[str, Any], question: str) -> None:
        """Answer a question for this node, with the fields that `core.job.node_status` has for it."""
        answer = {"kind": "answer", "question": question, "document": dict(document)}
        self._loop.call_soon_threadsafe(lambda: self._node.send(answer))

    def gather_status(self, question: str, wait_limit: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes a question; `deliver` gets the documents that have come within so many seconds, once."""
        self._loop.call_soon_threadsafe(lambda: self._node.ask_all(question, wait_limit, deliver))

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; only the coordinator knows them."""
        return [] if self.coordinator is None else self.coordinator.list_left_out()

    def describe_wait(self) -> str:
        """Return which nodes are there, and which are missing, while this node waits for others; otherwise ""."""
        return self._node.notices.described

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._loop.run_until(lambda: self._is_over)
        except Exception as error:
            import logging

            logging.getLogger(__name__).exception("a defect in the rendezvous, thread rendezvous")
            self._node.deliver(Lost("internal_error", f"a defect in the rendezvous: {error!r}"))
        finally:
            self._loop.close()

    def _deliver(self, event: SessionEvent) -> None:
        if isinstance(event, Ended | Refused | Lost):
            self._end = event
        self._deliver_to_agent(event)

    # --- the end -----------------------------------------------------------------------------------------------------
    def close(self, timeout: float) -> None:
        """Say what is left to say, stay where other nodes depend on this one, and stop the threads; once.

        A coordinator stays until the live agents have read the verdict. If it has left since it is unhealthy, and no
        other node can coordinate, it stays until the other nodes have ended, whatever `timeout` says; before the first
        round it waits a moment for other nodes.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._is_started:
            self._stay(timeout)
            self._loop.call_soon_threadsafe(self._part)
            self._thread.join(_WAIT_LIMIT)
        else:
            self._loop.close()
        if self.coordinator is not None:
            self.coordinator.close()
            self._release(is_over=isinstance(self._end, Ended))
        self._place.close()

    def _part(self) -> None:
        self._node.drop_link()
        self._is_over = self._node.is_over = True

    def _stay(self, timeout: float) -> None:
        """Wait as long as other nodes depend on this one."""
        is_unhealthy = self._leaving is not None and self._leaving.reason == UNHEALTHY
        deadline = time.monotonic() + (_LATE_NODES if is_unhealthy else timeout)
        if not isinstance(self._end, Lost):
            self._wait_said(_LATE_NODES if is_unhealthy else min(timeout, _LEAVE_TIME, self._lease))
        coordinator, left = self.coordinator, max(0.0, deadline - time.monotonic())
        if coordinator is None:
            return
        if isinstance(self._end, Ended):
            self._wait_known(coordinator, left)
        elif is_unhealthy and self._place.dies_with_host and self._is_needed:
            self._serve_on(coordinator, left)
        elif coordinator.hosts_of_others and (self._leaving is not None or isinstance(self._end, Refused)):
            self._hand_over(coordinator, left)

    def _wait_said(self, timeout: float, *, hands_over: bool = False) -> None:
        """Wait until the coordinator, or with `hands_over` the next one, has read all that this node had to say."""
        is_said = threading.Event()
        self._loop.call_soon_threadsafe(lambda: self._node.call_when_said(is_said.set, hands_over=hands_over))
        is_said.wait(timeout)

    def _wait_known(self, coordinator: Coordinator, timeout: float) -> None:
        """Wait until each node that is connected has gone with the verdict; a line tells of the wait."""
        left = timeout - _MOMENT
        if not coordinator.wait_others(min(_MOMENT, timeout), are_there=False) and left > 0:
            import logging

            logging.getLogger(__name__).warning(
                "elastic-run: the job is over; waiting up to %.0f s for nodes that do not know it yet: %s",
                left,
                ", ".join(list_hosts(sorted(coordinator.hosts_of_others))),
            )
            coordinator.wait_others(left, are_there=False)

    def _hand_over(self, coordinator: Coordinator, timeout: float) -> None:
        """Leave the coordination to another agent, or end the job where there is none."""
        limit = min(timeout, _HANG_UP)
        if self._place.successors or not self._place.dies_with_host:
            if coordinator.has_heirs:
                self._release(is_over=False)
                self._wait_said(limit, hands_over=True)
            return
        why = "was not taken into the job" if isinstance(self._end, Refused) else "was told to stop"
        detail = (
            f"the node that served the store at {self._place.name} ({self._node.host}) {why}, and the job ends with "
            "it: the endpoint lists no successor (--rdzv-endpoint=a,b,c)"
        )
        self._deliver_to_agent(Notice("this node serves the job's store: the job ends with it"))
        coordinator.end_job(detail)
        coordinator.wait_others(limit, are_there=False)

    @property
    def _is_needed(self) -> bool:
        """Whether no other agent can coordinate, or none may have started yet."""
        member = self._node.member
        is_awaited = member is None or member.started is None
        return not self._place.successors or (is_awaited and not self._is_announced)

    def _serve_on(self, coordinator: Coordinator, come_within: float) -> None:
        """Coordinate without workers until no other node is connected."""
        if not coordinator.hosts_of_others:
            if self._is_announced or come_within <= 0:
                return
            why = "so that new nodes learn why it has left the job"
            self._deliver_to_agent(Notice(f"this node serves the job's store for {come_within:.0f} s more, {why}"))
            if not coordinator.wait_others(come_within, are_there=True):
                return
        text = (
            "this node serves the job's store, so it stays without workers until the other nodes have ended; a signal "
            "ends it, and the job with it"
        )
        self._deliver_to_agent(Notice(text))
        coordinator.wait_others(LONGEST_WAIT, are_there=False)

    def _release(self, *, is_over: bool) -> None:
        """Give up what this agent holds of the place; a store that does not answer holds up nobody for long."""
        release = threading.Thread(target=lambda: self._place.release(is_over=is_over), name="release", daemon=True)
        release.start()
        release.join(_WAIT_LIMIT if is_over else _LEAVE_TIME)


class _SharedWorkerStore(WorkerStore):
    """The workers' store at the port at which rank 0's agent coordinates, whose thread serves and empties it."""

    use_agent_store = True

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def serve(self, loop: Loop) -> None:
        """Nothing to do: the coordinator's thread serves it."""

    def renew(self) -> WorkerStore:
        """Return this same store: its port is fixed."""
        return self

    def close(self) -> None:
        """Nothing to do: the port belongs to the coordination as well."""
