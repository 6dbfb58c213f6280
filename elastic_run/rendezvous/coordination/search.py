"""Finds the coordinator of a job, or becomes it: `core.job.coordinator_search` says what to do, and this does it.

- What takes time (a connection, the lease's store) happens in a thread that ends with it; one question at a time.
- This agent's port is open from its start where it serves an endpoint, so that it can say whom it follows.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from elastic_run.core.job import coordinator_search as discovering
from elastic_run.core.job.documents import Promise
from elastic_run.core.job.founding import MAJORITY, ONLY_ONE
from elastic_run.core.job.membership import Refused
from elastic_run.core.job.state import BROKEN, SILENT, Job, MayFound, StepDown
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.coordinator import Coordinator
from elastic_run.rendezvous.coordination.link import MESSAGE, PARTING, encode_frame
from elastic_run.rendezvous.coordination.opening import REFUSED, Answer, ask
from elastic_run.rendezvous.coordination.places import LeasePlace, split_endpoint
from elastic_run.rendezvous.events import Lost, Notice
from elastic_run.store.connecting import Backoff
from elastic_run.store.errors import (
    CLOSED,
    FOREIGN,
    StoreAccessError,
    StoreConnectionError,
    StoreError,
    StoreTokenError,
)
from elastic_run.store.errors import REFUSED as NOBODY_LISTENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol, TypeAlias

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.coordinator_search import Action, Discovery, Fact
    from elastic_run.core.job.membership import Member
    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.opening import Hello, Identity
    from elastic_run.rendezvous.coordination.outage import Outage
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.events import SessionEvent

    Found: TypeAlias = tuple[Answer, socket.socket | None, bytes]

    class _Owner(Protocol):
        """The `Node` for which the coordinator is searched."""

        member: Member | None
        local_addr: str
        is_over: bool

        def deliver(self, event: SessionEvent) -> None: ...
        def use(self, connected: socket.socket, rest: bytes, promise: Promise, *, is_own: bool = False) -> None: ...
        def drop_link(self) -> None: ...
        def say(self) -> None: ...


#: Seconds for one attempt to reach an agent.
_ANSWER = 3.0
#: Seconds for the port of a killed agent to close; pauses between attempts at first, and at most.
_DYING = 1.0
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1


class CoordinatorSearch:
    """One agent's search, in the loop of its node."""

    def __init__(
        self, loop: Loop, identity: Identity, place: Place, config: JobConfig, outage: Outage, node: _Owner
    ) -> None:
        self.coordinator: Coordinator | None = None  # this agent's port and its coordination
        self._loop = loop
        self._identity = identity
        self._place = place
        self._config = config
        self._outage = outage
        self._node = node
        self._discovery = self._begin_discovery()
        self._standing = 0
        self._few_since: float | None = None  # since when this agent has coordinated too few nodes
        self._questions = 0
        self._timer: Timer | None = None
        #: The connection on which a coordinator has just answered, what was read behind the answer, and its promise.
        self._opened: tuple[socket.socket, bytes, Promise] | None = None

    @property
    def dead(self) -> str:
        """The last coordinator that is surely dead, or ""."""
        return self._discovery.dead

    def begin(self) -> None:
        """Listen where this agent has to, and look for the coordinator."""
        try:
            self._serve()
        except OSError as error:
            self._node.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        self._outage.begin()
        self._discovery = self._begin_discovery()
        self._advance(None)

    def _begin_discovery(self) -> Discovery:
        place = self._place
        return discovering.begin(self._identity.node, place.names, place.own, self._config.lease)

    def search_again(self, how: str, to: str = "") -> None:
        """Look for another coordinator, at `to` first: the connection to the last one has ended, and how."""
        if self._discovery.role == discovering.COORDINATES and self.coordinator is not None:
            self.coordinator.end_term()
        if not self._place.own and self._place.choice == MAJORITY:
            try:
                self._serve()  # another agent of this machine may have served its endpoint so far
            except OSError as error:
                import logging

                logging.getLogger(__name__).debug("elastic-run: the endpoint can't be served here: %s", error)
            self._discovery = replace(self._discovery, own=self._place.own)
        if self._is_leaving:
            self._discovery = replace(self._discovery, own="")  # it never coordinates again
        self._advance(discovering.CoordinatorLost(how, to))

    @property
    def _is_leaving(self) -> bool:
        return self._node.member is not None and bool(self._node.member.leaving)

    def _serve(self) -> None:
        """Listen at this agent's endpoint, if it has one."""
        if self._place.serve():
            self._listen()

    def _listen(self) -> Coordinator:
        place = self._place
        if self.coordinator is None:
            self.coordinator = Coordinator(
                self._identity,
                place.take_sockets(),
                serves_workers=place.serves_workers,
                call=self._loop.call_soon_threadsafe,
                on_standing=self._take_standing,
                on_event=self._node.deliver,
            )
        if place.notice:
            self._node.deliver(Notice(place.notice))
            place.notice = ""
        return self.coordinator

    # --- facts in, actions out ---------------------------------------------------------------------------------------
    def _advance(self, fact: Fact) -> None:
        if self._node.is_over:
            return
        if self._timer is not None:
            self._timer.cancel()
        dead = self._discovery.dead
        self._discovery, actions = discovering.decide(self._discovery, fact, self._loop.now(), standing=self._standing)
        for action in actions:
            self._perform(action)
        if self._opened is not None:
            _discard(self._opened[0])
            self._opened = None
        if self.coordinator is not None:
            member = self._node.member
            standing = discovering.KNOWS_NOTHING if member is None else discovering.compute_node_standing(member)
            found = discovering.make_answer(self._discovery, standing)
            self.coordinator.answer = Answer(found.role, found.node, found.standing, to=found.to)
        if self._discovery.dead != dead:
            self._node.say()  # the coordinator needs no longer wait for that one

    def _take_standing(self, standing: int) -> None:
        self._standing = standing
        if standing == discovering.RUNS_ROUND:
            self._few_since = None
        elif self._few_since is None:
            self._few_since = self._loop.now()
        self._advance(None)

    def _perform(self, action: Action) -> None:
        if isinstance(action, discovering.Ask):
            self._ask(action.endpoint)
        elif isinstance(action, discovering.Follow):
            self._follow(action.endpoint)
        elif isinstance(action, discovering.AcquireLease) and self._is_leaving:
            self._loop.call_soon(lambda: self._advance(discovering.Answer(discovering.LEASE_STORE, SILENT)))
        elif isinstance(action, discovering.AcquireLease):
            self._use_lease(lambda place: place.acquire(action.instead_of))
        elif isinstance(action, discovering.BecomeCoordinator):
            self._coordinate(action.dead, action.silent)
        elif isinstance(action, MayFound | StepDown) and self.coordinator is not None:
            self.coordinator.note(action)
        elif isinstance(action, discovering.WaitUntil):
            self._timer = self._loop.call_at(action.at, lambda: self._advance(None))

    def _follow(self, endpoint: str) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            self._few_since = None
            self._node.use(*opened)
            return
        # It was asked by a coordinator, which joined nothing; now a node asks.
        self._node.drop_link()
        self._outage.begin()
        self._advance(discovering.CoordinatorLost(BROKEN, endpoint))

    # --- this agent coordinates --------------------------------------------------------------------------------------
    def _coordinate(self, dead: str, silent: str) -> None:
        own, others = socket.socketpair()
        place, member = self._place, self._node.member
        term = 1 if member is None else member.promise.term + 1
        lease = place if isinstance(place, LeasePlace) else None
        if lease is not None:
            term = max(term, lease.term)  # the store may have lost its data, and count from the beginning
        job = Job(
            Promise(term, self._identity.node),
            place.choice,
            self._loop.now(),
            few_since=self._few_since,
            dead=dead,
            silent=silent,
            may_found=place.choice == ONLY_ONE,
        )
        self._listen().begin(job, others, lease)
        self._node.use(own, b"", job.promise, is_own=True)

    # --- other agents ------------------------------------------------------------------------------------------------
    def _ask(self, name: str) -> None:
        if name == discovering.LEASE_STORE:
            self._use_lease(lambda place: place.look())
            return
        is_look = self._discovery.role == discovering.COORDINATES
        hello = self._identity.make_hello(joins=not is_look)
        limit = min(_ANSWER, self._outage.attempt_limit)
        is_dying = self._discovery.has_ended and name == self._discovery.coordinator[0]
        self._questions += 1
        question = self._questions

        def look() -> None:
            found: Found | StoreError
            try:
                found = self._reach(split_endpoint(name), hello, limit, is_dying=is_dying)
            except StoreError as error:
                found = error
            except OSError as error:  # no descriptor is left for a connection
                found = StoreConnectionError(f"{name}: {error.strerror or error}")
            self._loop.call_soon_threadsafe(lambda: self._take_answer(name, found, question, is_look=is_look))

        threading.Thread(target=look, name="rendezvous-ask", daemon=True).start()

    def _take_answer(self, name: str, found: Found | StoreError, question: int, *, is_look: bool) -> None:
        is_late = question != self._questions or self._node.is_over  # another question was asked meanwhile
        if isinstance(found, StoreError):
            if not is_late:
                self._miss(name, found, is_look=is_look)
            return
        answer, connected, rest = found
        if is_late and connected is not None:
            _discard(connected)
        elif not is_late and answer.role == REFUSED:
            self._miss(name, StoreTokenError(answer.detail), is_look=is_look)
        elif not is_late:
            self._opened = None if connected is None else (connected, rest, Promise(answer.term, answer.node))
            self._advance(discovering.Answer(name, answer.role, answer.node, answer.to, answer.standing))

    def _reach(self, endpoint: tuple[str, int], hello: Hello, limit: float, *, is_dying: bool) -> Found:
        """Ask an agent, which may have been killed a moment ago."""
        pauses, end = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), time.monotonic() + _DYING
        while True:
            try:
                return ask(endpoint, hello, limit, self._place.credentials, dark_after=self._config.lease)
            except StoreConnectionError as error:
                # The kernel closes the sockets of a killed agent one by one, so its port refuses a moment later. No
                # descriptor shows that the port has closed: only a retry of the connection.
                if not is_dying or error.reason != CLOSED or time.monotonic() > end:
                    raise
            time.sleep(pauses.next_pause())

    def _miss(self, name: str, error: StoreError, *, is_look: bool) -> None:
        """Take in that nobody coordinates there."""
        reason = getattr(error, "reason", CLOSED)
        was_reached = self._outage.was_reached
        if isinstance(error, StoreTokenError) and not was_reached and not is_look:
            self._node.deliver(Refused(str(error)))
            return
        if reason == NOBODY_LISTENS and self._place.is_undecided and not was_reached:
            try:
                self._serve()
            except OSError as refusal:
                message = f"the store can't be served here: {refusal}"
                error = StoreConnectionError(message)
            if self._place.own:
                self._discovery = self._begin_discovery()
                self._advance(None)
                return
        if not is_look:
            self._outage.failed(name, error)
        self._advance(discovering.Answer(name, discovering.REFUSES if reason == NOBODY_LISTENS else SILENT))

    # --- the lease ---------------------------------------------------------------------------------------------------
    def _use_lease(self, use: Callable[[LeasePlace], discovering.Answer]) -> None:
        """Read or acquire the lease, in a thread: the store may take seconds."""
        place = self._place
        if not isinstance(place, LeasePlace):
            return

        def call() -> None:
            try:
                place.prepare(self._identity, self._node.local_addr)
                answer = use(place)
            except Exception as caught:  # noqa: BLE001 - also what the shape of an answer leads to, which a stranger made
                error = caught
                if not isinstance(caught, StoreError | OSError):
                    error = StoreConnectionError(f"{place.name}: the answer can't be read: {caught!r}", FOREIGN)
                self._loop.call_soon_threadsafe(lambda: self._miss_lease(error))
            else:
                self._loop.call_soon_threadsafe(lambda: self._advance(answer))

        threading.Thread(target=call, name="rendezvous-lease", daemon=True).start()

    def _miss_lease(self, error: Exception) -> None:
        if isinstance(error, StoreTokenError) and not self._outage.was_reached:
            self._node.deliver(Refused(str(error)))
        elif isinstance(error, StoreAccessError):
            self._node.deliver(Lost("rendezvous", f"the store at {self._place.name}: {error}"))
        elif not isinstance(error, StoreError):
            self._node.deliver(Lost("rendezvous", f"this node can't listen for other nodes: {error}"))
        else:
            self._outage.failed(discovering.LEASE_STORE, error)
            self._advance(discovering.Answer(discovering.LEASE_STORE, SILENT))


def _discard(connected: socket.socket) -> None:
    """Close a connection that nobody needs; its end must not look like the death of this node."""
    with suppress(OSError):
        connected.sendall(encode_frame(MESSAGE, PARTING))
    connected.close()
