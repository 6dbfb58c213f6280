"""One node of a job: it says what it is, obeys its coordinator, and brings its agent the events. In its session's loop.

- `search` finds the coordinator, or starts it here, and gives this node the connection (`use`). On the connection the
  node sends its `NodeState` whenever that changes, and reads the coordinator's `Order`. What an order means for the
  node says `core.job.membership`.
- When the connection ends, the search goes on, and so do the workers (but see `--fence-after`).
- The agent hears of a round only once the way to rank 0's store was seen to be open from here: workers that can't reach
  it would only time out, much later and with less to say. A round that is halted before was never the agent's.
"""

from __future__ import annotations

import math
import threading

from elastic_run.core.job import membership
from elastic_run.core.job.codec import MessageError, encode, from_document, to_message
from elastic_run.core.job.documents import IDLE, RUNS, Order, RoundEnd
from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.core.job.membership import (
    CutOff,
    Ended,
    Formed,
    Halted,
    Member,
    OrderRead,
    Refused,
    Search,
    Warned,
    WorkersGone,
)
from elastic_run.core.job.node_status import WaitStatus
from elastic_run.core.job.restart_policy import STOPPED, UNREACHABLE
from elastic_run.core.job.state import BROKEN, SILENT
from elastic_run.records import replace
from elastic_run.rendezvous.addresses import WILDCARDS, find_listening
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.opening import Identity
from elastic_run.rendezvous.coordination.outage import Outage
from elastic_run.rendezvous.coordination.questions import OwnQuestions
from elastic_run.rendezvous.coordination.search import CoordinatorSearch
from elastic_run.rendezvous.events import Lost, Notice, StatusAsked
from elastic_run.report.waiting import NEW, READY, WaitNotices
from elastic_run.store.connecting import connect_once, format_endpoint
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.documents import Promise, StoreAddress
    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.events import SessionEvent, Setup

#: Seconds for a name server to say which of this machine's addresses others use; to reach rank 0's store.
_LOOK_UP = 3.0
_REACH = 5.0
#: From so many nodes on, the coordinator may take so many leases to answer before the first round.
_CROWD, _CROWD_LEASES = 256, 2


class Node:
    """One node; see `Session` for the arguments."""

    open_worker_store: Callable[[str], StoreAddress]  # set before the search begins

    def __init__(
        self,
        loop: Loop,
        node: str,
        place: Place,
        setup: Setup,
        config: JobConfig,
        *,
        local_addr: str,
        describe_join: Callable[[str, int], str] | None,
        deliver: Callable[[SessionEvent], None],
    ) -> None:
        self.local_addr = local_addr
        self.listening_host = ""
        self.member: Member | None = None  # the node as it knows itself, once it has come to a coordinator
        self.is_over = False  # whether nothing is searched or said any more
        self.host = setup.node_info.host
        self._loop = loop
        self._id = node
        self._place = place
        self._setup = setup
        self._config = config
        self._describe_join = describe_join
        self._deliver_to_agent = deliver
        self._hold: Callable[[int], None] = lambda _: None
        self._early: list[membership.Event] = []
        self._link: Link | None = None
        self._is_own = False  # whether the connection is to this agent's own coordination
        self._is_ordered = False  # whether this node has promised to follow the coordinator
        self._said: dict[str, Any] | None = None
        self._when_said: list[Callable[[], None]] = []
        self._lost_at = 0.0
        self._formed: Formed | None = None  # the way is not yet seen to be open
        self._warned: Warned | None = None
        self._wait_timer: Timer | None = None
        self._questions = OwnQuestions(loop)
        self._outage = Outage(place, config, self.deliver, shows_waiting=setup.shows_waiting)
        identity = Identity(place.run_id, node, self.host, config.lease, place.credentials)
        self.search = CoordinatorSearch(loop, identity, place, config, self._outage, self)
        self.notices = WaitNotices(
            state=self._name_state,
            doubt=lambda is_alone: place.describe_need() if is_alone else "",
            shows_waiting=setup.shows_waiting,
            deliver=self.deliver,
            spare_hint=place.describe_other_job(),
        )

    def deliver(self, event: SessionEvent) -> None:
        """Bring an event to the agent; nothing follows the last one."""
        if not self.is_over:
            self.is_over = isinstance(event, Ended | Refused | Lost)
            self._deliver_to_agent(event)

    def complete(self, address: StoreAddress) -> StoreAddress:
        """Return a workers' store's address as other nodes reach it."""
        if self._place.serves_workers and self._place.own:
            return replace(address, host=self._place.endpoints[self._place.own][0])
        return replace(address, host=self.local_addr) if address.host in ("", *WILDCARDS) else address

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
        self._outage.end()
        # Hundreds of nodes that come at once keep the coordinator busy.
        is_crowd = self._config.max_nodes >= _CROWD and (self.member is None or self.member.started is None)
        self._link = link = Link(
            self._loop,
            connected,
            lease=self._config.lease * (_CROWD_LEASES if is_crowd else 1),
            on_document=self._obey,
            on_message=self._read_message,
            on_end=self._lose_link,
        )
        link.on_delivered = self._check_said
        self._said = None
        self.feed(membership.Connected(promise))
        # A node that leaves may have promised to follow another coordinator, and keeps that promise.
        self._is_ordered = self.member is not None and (self.member.promise == promise or bool(self.member.leaving))
        if rest and not link.is_closed:
            link.feed(rest)

    def hold_with(self, hold: Callable[[int], None]) -> None:
        """Let the guardian hold the connection from now on; see `Session.hold_connections_with`."""
        self._hold = hold
        if self._link is not None and not self._is_own:
            hold(self._link.fileno())

    def _join(self) -> bool:
        """Say who this node is from now on: it has found the job."""
        place = self._place
        if not self.local_addr:
            self.local_addr = place.find_local_address()
        found = find_listening(self.local_addr, _LOOK_UP)
        reason = found.reason
        if len(found.hosts) == 1:
            self.listening_host = found.hosts[0]
        elif found.hosts:
            reason = f"{self.local_addr} has several addresses ({', '.join(found.hosts)})"
        if reason and not place.serves_workers:
            self.deliver(Notice(f"the workers' store listens on all interfaces: {reason}"))
        try:
            address = self.open_worker_store(self.listening_host)
        except OSError as error:
            self.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return False
        if self._describe_join is not None and not self._early:
            self.deliver(Notice(self._describe_join(self.local_addr, place.port)))
        serves_store = self.search.coordinator is not None and place.dies_with_host
        node_info = replace(self._setup.node_info, serves_store=serves_store)
        self.member = Member(self._id, node_info, self._config, self.complete(address))
        early, self._early = self._early, []
        for event in early:
            self.feed(event)
        return True

    def drop_link(self) -> None:
        """Close the connection to the coordinator, which is told that this agent lives."""
        if self._link is not None:
            self._link.part()
            self._link = None
        self._questions.give_up()

    def _lose_link(self, how: str, _detail: str) -> None:
        self._link = None
        self.drop_link()
        self._check_said()
        if self.is_over:
            return
        lease = self._config.lease
        self._lost_at = self._loop.now() - (lease if how == SILENT else 0.0)
        self._outage.begin()
        if self._setup.node_config.fence_after == "lease":
            self._loop.call_at(self._lost_at + lease, self._fence)
        self.search.search_again(how)

    def _fence(self) -> None:
        silent_for = self._loop.now() - self._lost_at
        if self._link is None and self.member is not None and self.member.phase == RUNS:
            self.feed(CutOff(silent_for))

    # --- orders down, state up ---------------------------------------------------------------------------------------
    def _obey(self, document: dict[str, Any]) -> None:
        try:
            order = from_document(Order, document)
        except MessageError as error:
            import logging

            logging.getLogger(__name__).warning("elastic-run: the coordinator's order can't be read: %s", error)
            return
        self._is_ordered = True
        self.feed(OrderRead(order))
        self._check_said()

    def feed(self, event: membership.Event) -> None:
        """Take in an order, or what has become of this node's workers."""
        if self.member is None:
            self._early.append(event)
            return
        self.member, commands = membership.decide(self.member, event, self._loop.now())
        for command in commands:
            self._perform(command)
        self.say()
        self._plan_wait()

    def _perform(self, command: membership.Command) -> None:
        if isinstance(command, Formed):
            if self._link is not None:
                self._link.lease = self._config.lease
            self._enter(command)
        elif isinstance(command, Warned) and self._formed is not None:
            self._warned = command
        elif isinstance(command, Halted) and self._formed is not None:
            self._end_round(self._formed, STOPPED, "")
        elif isinstance(command, Warned | Halted):
            self.deliver(command)
        elif isinstance(command, Search):
            self.drop_link()
            self._outage.begin()
            self.search.search_again(BROKEN, command.to)
        else:
            self.deliver(command)
            self.drop_link()

    def say(self) -> None:
        """Tell the coordinator what this node is, if that has changed."""
        if self._link is None or self.member is None or self.is_over:
            return
        now, dead = self._loop.now(), self.search.dead
        state = to_message(membership.make_state(self.member, now, is_first=self._said is None, dead=dead))
        if self._said is None or {**state, "memory": None} != {**self._said, "memory": None}:
            self._said = state
            self._link.offer(encode(state))

    def call_when_said(self, call: Callable[[], None], *, hands_over: bool) -> None:
        """Call once the coordinator has read all that this node had to say; see `Session.close`."""
        if hands_over:
            self.drop_link()
            self.search.search_again(BROKEN)
        self._when_said.append(call)
        self._check_said()

    def _check_said(self) -> None:
        # A coordinator that is new to a node that leaves has to be promised its term, too.
        has_said = self._link is not None and self._link.has_delivered and self._is_ordered
        is_alone = self._link is None and self.member is not None and self._place.choice == ONLY_ONE
        if has_said or is_alone or self.is_over:
            for call in self._when_said:
                call()
            self._when_said.clear()

    # --- the way into a round ----------------------------------------------------------------------------------------
    def _enter(self, formed: Formed) -> None:
        """Let the agent have a round as soon as the way to rank 0's store is open."""
        place = formed.assignment
        self._formed, self._warned = formed, None
        if place.group_rank == 0 or not place.master.use_agent_store:
            self._admit(formed, "")
            return
        host, port = place.master.host, place.master.port

        def look() -> None:
            detail = ""
            try:
                connect_once(host, port, _REACH, dark_after=_REACH).close()
            except StoreConnectionError as error:
                where = f"the store of rank 0 at {format_endpoint(host, port)}"
                detail = f"{self.host} ({self.local_addr}) can't reach {where}: {error.cause}"
            self._loop.call_soon_threadsafe(lambda: self._admit(formed, detail))

        threading.Thread(target=look, name="rendezvous-way", daemon=True).start()

    def _admit(self, formed: Formed, trouble: str) -> None:
        if self._formed is not formed:
            return
        if trouble:
            self._end_round(formed, UNREACHABLE, trouble)
            return
        self._formed = None
        self.deliver(formed)
        if self._warned is not None:
            self.deliver(self._warned)

    def _end_round(self, formed: Formed, outcome: str, detail: str) -> None:
        """Say that nothing of a round lives here: the agent was never told of it."""
        self._formed = None
        if self.member is not None:
            self.feed(WorkersGone(formed.assignment.round, RoundEnd(outcome, detail=detail), self.member.store_address))

    # --- messages ----------------------------------------------------------------------------------------------------
    def send(self, message: dict[str, Any]) -> None:
        """Send the coordinator a message, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def ask_all(self, question: str, wait: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes; see `Session.gather_status`."""
        if self._link is None:
            deliver([])
        else:
            self._questions.ask(self._link, question, wait, deliver)

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
        if member is None or self.is_over or self._link is None:
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
            if self._said is not None and self._name_state() == READY:
                # The coordinator may have stopped before it said what follows the round: it has to acknowledge this.
                self._link.offer(encode({**self._said, "memory": None}))
        self._plan_wait()
