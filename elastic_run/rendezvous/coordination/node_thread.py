"""A node's side of the coordination: it finds the coordinator, obeys it, and tells the agent. A thread with a loop.

- `coordinator_search` finds the coordinator, or starts it here; `core.job.membership` says what an order means for this
  node.
"""

from __future__ import annotations

import logging
import math
import threading

from elastic_run import __version__
from elastic_run.core.job import membership
from elastic_run.core.job.coordination import BROKEN, SILENT
from elastic_run.core.job.documents import IDLE, RUNS, Order
from elastic_run.core.job.membership import Member, OrderRead, Search
from elastic_run.core.job.node_events import CutOff, Ended, Formed, Halted, Refused, Settled, Warned, WorkersGone
from elastic_run.core.job.succession import ONLY_ONE
from elastic_run.core.job.wait_status import WaitStatus
from elastic_run.core.protocol.codec import MessageError, encode, from_document, to_message
from elastic_run.loop import Loop
from elastic_run.records import dataclass, replace
from elastic_run.rendezvous.addresses import find_listening
from elastic_run.rendezvous.coordination.coordinator_search import CoordinatorSearch
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.opening import Identity
from elastic_run.rendezvous.coordination.outage import Outage
from elastic_run.rendezvous.coordination.questions import OwnQuestions
from elastic_run.rendezvous.coordination.round_entry import RoundEntry
from elastic_run.rendezvous.coordination.step_check import StepCheck
from elastic_run.rendezvous.session import Lost, Notice, StatusAsked, Waiting
from elastic_run.report.waiting import NEW, READY, WaitNotices

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.documents import Promise
    from elastic_run.core.job.node_events import Leaving
    from elastic_run.core.protocol.facts import NodeInfo, StoreAddress
    from elastic_run.loop import Timer
    from elastic_run.rendezvous.coordination.coordinator_thread import CoordinatorThread
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.session import SessionEvent, Setup

__all__ = ["NodeDescription", "NodeThread"]

_log = logging.getLogger(__name__)

#: Seconds for a name server to say which of this machine's addresses others use.
_LOOK_UP = 3.0
#: From so many nodes on, the coordinator may take so many leases to answer before the first round.
_CROWD, _CROWD_LEASES = 256, 2
#: Characters of the endpoints that another launcher of the step is told.
_SHOWN = 200
_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What a node is, and where it looks for its job."""

    node: str
    place: Place
    setup: Setup
    config: JobConfig  # with the settings of the rendezvous
    local_addr: str  # the address for other nodes; "" to find out
    offers_store: bool  # whether the agent opens a workers' store for each round
    worker_host: str  # MASTER_ADDR where it is not the node's address; else ""
    describe_join: Callable[[str, int], str] | None  # says how others join at a host and a port; None where they know


class NodeThread:
    """One node of a job.

    Attributes:
        local_addr: The address at which others reach this node, "" until it is known.
        listening_host: Where this node's workers' stores listen; "" for all interfaces.
        member: The node as it knows itself, None until it has come to a coordinator.
    """

    def __init__(
        self,
        description: NodeDescription,
        *,
        deliver: Callable[[SessionEvent], None],
        open_worker_store: Callable[[str], StoreAddress],
        hold: Callable[[int], None],
    ) -> None:
        self.local_addr = description.local_addr
        self.listening_host = ""
        self.member: Member | None = None
        self._description = description
        self._place = place = description.place
        self._setup = setup = description.setup
        self._config = config = description.config
        self._deliver_to_agent = deliver
        self._open_worker_store = open_worker_store
        self._hold = hold
        self._loop = Loop()
        self._is_over = False
        self._has_end = False
        self._early: list[membership.Event] = []
        self._link: Link | None = None
        self._is_own = False  # whether the connection is to this agent's own coordination
        self._is_ordered = False  # whether this node has promised to follow the coordinator
        self._said: dict[str, Any] | None = None
        self._when_said: list[Callable[[], None]] = []
        self._lost_at = 0.0
        self._entry = RoundEntry(self._loop, self.deliver, self._end_round)
        self._wait_timer: Timer | None = None
        self._questions = OwnQuestions(self._loop)
        self._outage = Outage(place, config, setup.node_config, shows_waiting=setup.shows_waiting)
        host = setup.node_info.host
        step = setup.node_config.launch_step if place.dies_with_host else None
        identity = Identity(
            *(place.run_id, description.node, host, __version__, config.lease, place.credentials),
            *(() if step is None else (step.name, ",".join(place.names)[:_SHOWN])),
        )
        self._search = CoordinatorSearch(self._loop, identity, place, config, self._outage, self)
        self._step_check: StepCheck | None = None
        if step is not None:
            port = next(iter(place.endpoints.values()))[1]
            self._step_check = StepCheck(
                *(self._loop, identity, (step.first_host, port)),
                nodes=config.min_nodes,
                find_coordinator=self._find_awaited,
                refuse=self._search.refuse,
            )
        self.notices = WaitNotices(
            state=self._name_state,
            doubt=lambda is_alone: place.describe_need() if is_alone else "",
            shows_waiting=setup.shows_waiting,
            deliver=self.deliver,
            spare_hint=place.describe_other_job(),
        )
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    @property
    def coordinator(self) -> CoordinatorThread | None:
        """This agent's port and its coordination, or None."""
        return self._search.coordinator

    # --- calls of other threads --------------------------------------------------------------------------------------
    def start(self, leaving: Leaving | None = None) -> None:
        """Begin to look for the coordinator; a node that leaves already comes to say so."""
        if leaving is not None:
            self._early.append(leaving)
        self._thread.start()

    def feed(self, event: membership.Event) -> None:
        """Tell what has become of this node's workers."""
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    def hold_with(self, hold: Callable[[int], None]) -> None:
        """Let the guardian hold the connection from now on; see `Session.hold_connections_with`."""

        def begin() -> None:
            self._hold = hold
            if self._link is not None and not self._is_own:
                hold(self._link.fileno())

        self._loop.call_soon_threadsafe(begin)

    def renew_store(self, address: StoreAddress) -> StoreAddress:
        """Return a workers' store's address as other nodes reach it."""
        host = self._description.worker_host or (self.local_addr if address.host in _WILDCARDS else address.host)
        return replace(address, host=host)

    def wait_said(self, timeout: float, *, hands_over: bool = False) -> bool:
        """Wait until the coordinator has read all that this node had to say; returns whether it has.

        A node that hands over leaves the coordination to another agent first, which is told that this node goes.
        """
        is_said = threading.Event()

        def begin() -> None:
            if hands_over:
                self.drop_link()
                self._search.search_again(BROKEN)
            self._when_said.append(is_said.set)
            self._look_whether_said()

        self._loop.call_soon_threadsafe(begin)
        return is_said.wait(timeout)

    def tell_status(self, document: dict[str, Any], question: str) -> None:
        """Answer a question for this node."""

        def tell() -> None:
            if self._link is not None:
                self._link.send({"kind": "answer", "question": question, "document": document})

        self._loop.call_soon_threadsafe(tell)

    def gather_status(self, question: str, wait: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes."""

        def begin() -> None:
            if self._link is None:
                deliver([])
            else:
                self._questions.ask(self._link, question, wait, deliver)

        self._loop.call_soon_threadsafe(begin)

    def close(self, timeout: float) -> None:
        """Leave the job's connections, and end the thread."""

        def end() -> None:
            if self._link is not None:
                self._link.part()
            self._is_over = self._search.is_over = True

        self._loop.call_soon_threadsafe(end)
        self._thread.join(timeout)

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._search.begin()
            if self._step_check is not None:
                self._step_check.plan()
            self._loop.run_until(lambda: self._is_over)
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent is told
            _log.exception("a defect in the rendezvous, thread rendezvous")
            self.deliver(Lost("internal_error", f"a defect in the rendezvous: {error!r}"))
        finally:
            self._loop.close()

    def _find_awaited(self) -> str | None:
        """Return the node that coordinates for this agent, or ""; None once it has a round, or needs none."""
        has_round = self.member is not None and (self.member.started is not None or bool(self.member.accepted))
        return None if has_round or self._has_end or self._is_over else self._search.followed

    def deliver(self, event: SessionEvent) -> None:
        """Bring an event to the agent; nothing follows the last one."""
        if not self._has_end:
            self._has_end = self._search.is_over = isinstance(event, Ended | Refused | Lost)
            self._deliver_to_agent(event)

    # --- the connection ----------------------------------------------------------------------------------------------
    def use(self, connected: socket.socket, rest: bytes, promise: Promise, *, is_own: bool = False) -> None:
        """Take a connection to the coordinator (`is_own`: to this agent's own), and say on it what this node is.

        `rest` was read from it before.
        """
        if not is_own:
            self._hold(connected.fileno())
        self._is_own = is_own
        if self.member is None and not self._join():
            connected.close()
            return
        self.drop_link()
        told = self._outage.end()
        if told:
            self.deliver(Notice(told))
            if self._setup.shows_waiting:
                self.deliver(Waiting(None, is_for_nodes=False))
        self._link = link = Link(
            self._loop,
            connected,
            lease=self._config.lease * (_CROWD_LEASES if self._is_in_crowd else 1),
            on_document=self._obey,
            on_message=self._read_message,
            on_end=self._lose_link,
        )
        link.on_delivered = self._look_whether_said
        self._said = None
        self._feed(membership.Connected(promise))
        self._is_ordered = self.member is not None and self.member.promise == promise
        if rest and not link.is_closed:
            link.feed(rest)

    @property
    def _is_in_crowd(self) -> bool:
        """Whether hundreds of nodes may come at once, which keep the coordinator busy."""
        return self._config.max_nodes >= _CROWD and (self.member is None or self.member.started is None)

    def _join(self) -> bool:
        """Say who this node is from now on: it has found the job."""
        if not self.local_addr:
            self.local_addr = self._place.find_local_address()
        self._choose_listening_host()
        try:
            address = self._open_worker_store(self.listening_host)
        except OSError as error:
            self.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return False
        describe_join = self._description.describe_join
        if describe_join is not None and not self._early:
            self.deliver(Notice(describe_join(self.local_addr, self._place.port)))
        node_info: NodeInfo = replace(
            self._setup.node_info,
            serves_store=self._search.coordinator is not None and self._place.dies_with_host,
        )
        self.member = Member(self._description.node, node_info, self._config, self.renew_store(address))
        early, self._early = self._early, []
        for event in early:
            self._feed(event)
        return True

    def _choose_listening_host(self) -> None:
        """Choose where this node's workers' stores listen; told to the user where that is everywhere."""
        found = find_listening(self.local_addr, _LOOK_UP)
        reason = found.reason
        if len(found.hosts) == 1:
            self.listening_host = found.hosts[0]
        elif found.hosts:
            reason = f"{self.local_addr} has several addresses ({', '.join(found.hosts)})"
        if reason and self._description.offers_store:
            self.deliver(Notice(f"the workers' store listens on all interfaces: {reason}"))

    def drop_link(self) -> None:
        """Close the connection to the coordinator, which is told that this agent lives."""
        if self._link is not None:
            self._link.part()
            self._link = None
        self._questions.give_up()

    def _lose_link(self, how: str, _detail: str) -> None:
        self._link = None
        self.drop_link()
        self._look_whether_said()
        if self._has_end or self._is_over:
            return
        lease = self._config.lease
        self._lost_at = self._loop.now() - (lease if how == SILENT else 0.0)
        self._outage.begin()
        if self._setup.node_config.fence_after == "lease":
            self._loop.call_at(self._lost_at + lease, self._fence)
        self._search.search_again(how)

    def _fence(self) -> None:
        silent_for = self._loop.now() - self._lost_at
        if self._link is None and self.member is not None and self.member.phase == RUNS:
            self._outage.fenced_after = silent_for
            self._feed(CutOff(silent_for))

    # --- what the coordinator and the agent say ----------------------------------------------------------------------
    def _obey(self, document: dict[str, Any]) -> None:
        try:
            order = from_document(Order, document)
        except MessageError as error:
            _log.warning("elastic-run: the coordinator's order can't be read: %s", error)
            return
        self._is_ordered = True
        self._feed(OrderRead(order))
        self._look_whether_said()

    def _feed(self, event: membership.Event) -> None:
        if self.member is None:
            self._early.append(event)
            return
        self.member, commands = membership.decide(self.member, event, self._loop.now())
        for command in commands:
            self._do(command)
        self.say()
        self._plan_wait()

    def say(self) -> None:
        """Tell the coordinator what this node is, if that has changed."""
        if self._link is None or self.member is None or self._has_end:
            return
        now, dead = self._loop.now(), self._search.dead
        state = to_message(membership.make_state(self.member, now, is_first=self._said is None, dead=dead))
        if self._said is None or {**state, "memory": None} != {**self._said, "memory": None}:
            self._said = state
            self._link.offer(encode(state))

    def _do(self, command: membership.Command) -> None:
        if isinstance(command, Formed):
            if self._link is not None:
                self._link.lease = self._config.lease
            self._entry.announce(command, f"{self._setup.node_info.host} ({self.local_addr})")
        elif isinstance(command, Warned):
            self._entry.warn(command)
        elif isinstance(command, Halted):
            self._entry.halt(command)
        elif isinstance(command, Settled):
            self.deliver(Notice(command.detail))
        elif isinstance(command, Search):
            self.drop_link()
            self._outage.begin()
            self._search.search_again(BROKEN, command.to)
        else:
            self.deliver(command)
            self.drop_link()

    def _look_whether_said(self) -> None:
        # A coordinator that is new to a node that leaves has to be promised its term, too.
        has_said = self._link is not None and self._link.has_delivered and self._is_ordered
        is_alone = self._link is None and self.member is not None and self._place.choice == ONLY_ONE
        if has_said or is_alone or self._has_end:
            for call in self._when_said:
                call()
            self._when_said.clear()

    def _end_round(self, number: int, outcome: str, detail: str) -> None:
        """Say that nothing of a round lives here: the agent was never told of it."""
        if self.member is not None:
            self._feed(WorkersGone(number, outcome, self.member.store_address, detail=detail))

    # --- messages ----------------------------------------------------------------------------------------------------
    def _read_message(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "wait":
            try:
                status = from_document(WaitStatus, message.get("status"))
            except MessageError:
                return
            self.notices.take(status, self._loop.now())
            self._plan_wait()
        elif kind == "asked" and isinstance(message.get("question"), str):
            self.deliver(StatusAsked(message["question"]))
        elif kind == "answers":
            self._questions.take(message)

    # --- lines for the user while this node waits for others ---------------------------------------------------------
    def _name_state(self) -> str | None:
        member = self.member
        if member is None or self._has_end or self._link is None:
            return None
        if member.started is None:
            return NEW
        return READY if member.phase == IDLE else None

    def _plan_wait(self) -> None:
        """Ask the coordinator who is there when a line may be due."""
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        now = self._loop.now()
        due = self.notices.next_look(now, self._config.keep_alive_interval)
        if due < math.inf:
            self._wait_timer = self._loop.call_at(max(now, due), self._ask_wait)

    def _ask_wait(self) -> None:
        self._wait_timer = None
        if self._link is not None:
            self.notices.note_look(self._loop.now())
            self._link.send({"kind": "wait"})
        self._plan_wait()
