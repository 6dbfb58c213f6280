"""Finds the coordinator of a job for one agent, or becomes it: `core.job.discovery` says what to do, this does it.

- What takes time (a connection, the lease's store) happens in a thread that ends with it; one question at a time.
- This agent's port is open from its start where it serves an endpoint, so that it can say whom it follows.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from elastic_run.core.job import discovery as discovering
from elastic_run.core.job.coordination import BROKEN, SILENT, MayFound, StepDown
from elastic_run.core.job.discovery import (
    COORDINATES,
    FOLLOWS,
    LEASE_STORE,
    REFUSES,
    AcquireLease,
    Ask,
    BecomeCoordinator,
    CoordinatorLost,
    Follow,
    WaitUntil,
)
from elastic_run.core.job.documents import Promise
from elastic_run.core.job.node_events import Refused
from elastic_run.core.job.succession import MAJORITY, ONLY_ONE
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.coordinator_thread import CoordinatorThread
from elastic_run.rendezvous.coordination.lease_place import LeasePlace, LeaseRenewal, split_endpoint
from elastic_run.rendezvous.coordination.link import MESSAGE, PARTING, encode_frame
from elastic_run.rendezvous.coordination.opening import CONTRADICTS, REFUSED, Answer, ask
from elastic_run.rendezvous.session import Lost, Notice
from elastic_run.store.connecting import Backoff
from elastic_run.store.errors import CLOSED, StoreAccessError, StoreConnectionError, StoreError, StoreTokenError
from elastic_run.store.errors import REFUSED as NOBODY_LISTENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.discovery import Action, Discovery, Fact
    from elastic_run.core.job.membership import Member
    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.opening import Identity
    from elastic_run.rendezvous.coordination.outage import Outage
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.session import SessionEvent

    class Owner(Protocol):
        """The node's thread, which gets the connection to the coordinator."""

        member: Member | None
        local_addr: str

        def deliver(self, event: SessionEvent) -> None: ...
        def use(self, connected: socket.socket, rest: bytes, promise: Promise, *, is_own: bool = False) -> None: ...
        def drop_link(self) -> None: ...
        def say(self) -> None: ...


__all__ = ["CoordinatorSearch"]

_log = logging.getLogger(__name__)

#: Seconds for one attempt to reach an agent.
_ANSWER = 3.0
#: Seconds for the port of a killed agent to close; pauses between attempts at first, and at most.
_DYING = 1.0
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1


class CoordinatorSearch:
    """One agent's search, in the loop of its node's thread; the owner gets the connection.

    Attributes:
        coordinator: This agent's port and its coordination, or None.
        is_over: Whether nothing is searched any more.
    """

    def __init__(
        self,
        loop: Loop,
        identity: Identity,
        place: Place,
        config: JobConfig,
        outage: Outage,
        owner: Owner,
    ) -> None:
        self.coordinator: CoordinatorThread | None = None
        self.is_over = False
        self._loop = loop
        self._identity = identity
        self._place = place
        self._config = config
        self._outage = outage
        self._owner = owner
        self._discovery: Discovery | None = None
        self._standing = 0
        self._short_since: float | None = None  # since when this agent has coordinated too few nodes
        self._questions = 0
        self._timer: Timer | None = None
        self._is_lease_open = False
        self._renewal: LeaseRenewal | None = None
        if isinstance(place, LeasePlace):
            self._renewal = LeaseRenewal(loop, place, config.lease, lambda: self._coordinates, owner.deliver)
        self._opened: dict[str, tuple[socket.socket, bytes, Promise]] = {}

    @property
    def dead(self) -> str:
        """The last coordinator that is surely dead, or ""."""
        return "" if self._discovery is None else self._discovery.dead

    @property
    def followed(self) -> str:
        """The node that coordinates for this agent, or ""."""
        found = self._discovery
        if found is None or found.role not in (COORDINATES, FOLLOWS):
            return ""
        return found.node if found.role == COORDINATES else found.coordinator[1]

    def refuse(self, detail: str) -> None:
        """End this agent, whose job can't come about."""
        self._owner.deliver(Refused(detail))

    def begin(self) -> None:
        """Listen where this agent has to, and look for the coordinator."""
        try:
            self._serve()
        except OSError as error:
            self._owner.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        self._outage.begin()
        self._restart()

    def _restart(self) -> None:
        place, lease = self._place, self._config.lease
        self._discovery = discovering.begin(self._identity.node, place.names, place.own, lease)
        self._advance(None)

    def search_again(self, how: str, to: str = "") -> None:
        """Look for another coordinator, at `to` first: the connection to the last one has ended, and how."""
        if self._discovery is not None and self._discovery.role == COORDINATES and self.coordinator is not None:
            self.coordinator.end_term()
        if not self._place.own and self._place.choice == MAJORITY and self._discovery is not None:
            try:
                self._serve()  # another agent of this machine may have served its endpoint so far
            except OSError as error:
                _log.debug("elastic-run: the endpoint can't be served here: %s", error)
            self._discovery = replace(self._discovery, own=self._place.own)
        if self._is_leaving and self._discovery is not None:
            self._discovery = replace(self._discovery, own="")  # it never coordinates again
        self._advance(CoordinatorLost(how, to))

    @property
    def _coordinates(self) -> bool:
        return not self.is_over and self._discovery is not None and self._discovery.role == COORDINATES

    @property
    def _is_leaving(self) -> bool:
        member = self._owner.member
        return member is not None and member.leaving is not None

    def _serve(self) -> None:
        """Listen at this agent's endpoint, if it has one."""
        if self._place.serve():
            self._listen()

    def _listen(self) -> CoordinatorThread:
        coordinator = self.coordinator
        if coordinator is None:
            coordinator = self.coordinator = CoordinatorThread(
                self._identity,
                on_standing=lambda standing: self._loop.call_soon_threadsafe(lambda: self._note_standing(standing)),
                on_contradiction=lambda text: self._loop.call_soon_threadsafe(lambda: self.refuse(text)),
                on_defect=lambda error: self._loop.call_soon_threadsafe(lambda: self._fail(error)),
            )
            coordinator.listen(self._place.take_sockets(), serves_workers=self._place.serves_workers)
        if self._place.notice:
            self._owner.deliver(Notice(self._place.notice))
            self._place.notice = ""
        return coordinator

    def _advance(self, fact: Fact) -> None:
        if self._discovery is None or self.is_over:
            return
        if self._timer is not None:
            self._timer.cancel()
        dead = self._discovery.dead
        self._discovery, actions = discovering.decide(self._discovery, fact, self._loop.now(), standing=self._standing)
        for action in actions:
            self._perform(action, self._discovery)
        for connected, *_ in self._opened.values():
            _discard(connected)
        self._opened.clear()
        if self.coordinator is not None:
            member = self._owner.member
            standing = discovering.KNOWS_NOTHING if member is None else discovering.compute_node_standing(member)
            found = discovering.make_answer(self._discovery, standing)
            self.coordinator.set_answer(Answer(found.role, found.node, found.standing, to=found.to))
        if self._discovery.dead != dead:
            self._owner.say()  # the coordinator needs no longer wait for that one

    def _fail(self, error: Exception) -> None:
        self._owner.deliver(Lost("internal_error", f"a defect in the rendezvous: {error!r}"))

    def _note_standing(self, standing: int) -> None:
        self._standing = standing
        if standing == discovering.RUNS_ROUND:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = self._loop.now()
        self._advance(None)

    def _perform(self, action: Action, discovery: Discovery) -> None:
        if isinstance(action, Ask):
            self._ask(action.endpoint, discovery)
        elif isinstance(action, Follow):
            opened = self._opened.pop(action.endpoint, None)
            if opened is None:
                # It was asked by a coordinator, which joined nothing; now a node asks.
                self._owner.drop_link()
                self._outage.begin()
                self._advance(CoordinatorLost(BROKEN, action.endpoint))
            else:
                self._short_since = None
                self._owner.use(*opened)
        elif isinstance(action, AcquireLease) and self._is_leaving:
            self._loop.call_soon_threadsafe(lambda: self._advance(discovering.Answer(LEASE_STORE, SILENT)))
        elif isinstance(action, AcquireLease):
            self._use_lease(lambda place: place.acquire(action.instead_of))
        elif isinstance(action, BecomeCoordinator):
            self._coordinate(action.dead, action.silent)
        elif isinstance(action, MayFound | StepDown) and self.coordinator is not None:
            self.coordinator.note(action)
        elif isinstance(action, WaitUntil):
            self._timer = self._loop.call_at(action.at, lambda: self._advance(None))

    # --- this agent coordinates --------------------------------------------------------------------------------------
    def _coordinate(self, dead: str, silent: str) -> None:
        own, others = socket.socketpair()
        member = self._owner.member
        term = 1 if member is None else member.promise.term + 1
        if isinstance(self._place, LeasePlace):
            term = max(term, self._place.term)  # the store may have lost its data, and count from the beginning
        promise = Promise(term, self._identity.node)
        self._listen().begin(
            promise,
            self._place.choice,
            others,
            dead=dead,
            silent=silent,
            short_since=self._short_since,
            may_found=self._place.choice == ONLY_ONE,
        )
        self._owner.use(own, b"", promise, is_own=True)
        if self._renewal is not None:
            self._renewal.begin(self._listen())

    # --- other agents ------------------------------------------------------------------------------------------------
    def _ask(self, name: str, discovery: Discovery) -> None:
        if name == LEASE_STORE:
            self._use_lease(lambda place: place.look())
            return
        is_look = discovery.role == COORDINATES
        hello = self._identity.make_hello(joins=not is_look)
        endpoint = self._place.endpoints.get(name) or split_endpoint(name)
        limit = min(_ANSWER, self._outage.attempt_limit)
        is_dying = discovery.has_ended and name == discovery.coordinator[0]

        def look() -> None:
            error: StoreError | None = None
            found: tuple[Answer, socket.socket | None, bytes] | None = None
            pauses, end = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), time.monotonic() + _DYING
            while found is None:
                try:
                    found = ask(endpoint, hello, limit, self._place.credentials, dark_after=self._config.lease)
                except StoreError as caught:
                    error = caught
                    # The kernel closes the sockets of a killed agent one by one, so its port refuses a moment later. No
                    # descriptor shows that the port has closed: only a retry of the connection (law 2 allows it).
                    if not is_dying or getattr(error, "reason", "") != CLOSED or time.monotonic() > end:
                        break
                    time.sleep(pauses.next_pause())
            self._loop.call_soon_threadsafe(lambda: take(found, error))

        self._questions += 1
        question = self._questions

        def take(found: tuple[Answer, socket.socket | None, bytes] | None, error: StoreError | None) -> None:
            if question == self._questions:
                self._take_answer(name, found, error, is_look=is_look)
            elif found is not None and found[1] is not None:
                _discard(found[1])  # another question was asked meanwhile

        threading.Thread(target=look, name="rendezvous-ask", daemon=True).start()

    def _take_answer(
        self,
        name: str,
        found: tuple[Answer, socket.socket | None, bytes] | None,
        error: StoreError | None,
        *,
        is_look: bool,
    ) -> None:
        if found is not None:
            answer, connected, rest = found
            if connected is not None:
                self._opened[name] = connected, rest, Promise(answer.term, answer.node)
            if answer.role not in (REFUSED, CONTRADICTS):
                self._advance(discovering.Answer(name, answer.role, answer.node, answer.to, answer.standing))
                return
            error = StoreTokenError(answer.detail)
        if error is not None:
            self._miss(name, error, is_look=is_look)

    def _miss(self, name: str, error: StoreError, *, is_look: bool) -> None:
        """Take in that nobody coordinates there."""
        reason = getattr(error, "reason", CLOSED)
        was_reached = self._outage.was_reached
        if isinstance(error, StoreTokenError) and not was_reached and not is_look:
            self._owner.deliver(Refused(str(error)))
            return
        if reason == NOBODY_LISTENS and self._place.is_undecided and not was_reached:
            try:
                self._serve()
            except OSError as refusal:
                message = f"the store can't be served here: {refusal}"
                error = StoreConnectionError(message)
            if self._place.own:
                self._restart()
                return
        news = None if is_look else self._outage.failed(name, error)
        if news is not None:
            self._owner.deliver(news)
        self._advance(discovering.Answer(name, REFUSES if reason == NOBODY_LISTENS else SILENT))

    # --- the lease ---------------------------------------------------------------------------------------------------
    def _use_lease(self, use: Callable[[LeasePlace], discovering.Answer]) -> None:
        """Read or acquire the lease, in a thread: the store may take seconds."""
        place = self._place
        if not isinstance(place, LeasePlace):
            return

        def call() -> None:
            try:
                if not self._is_lease_open:
                    self._is_lease_open = True
                    place.open(self._identity, timeout=max(1.0, self._config.lease / 2))
                    place.listen(self._owner.local_addr or place.find_local_address())
                answer = use(place)
            except (StoreError, OSError) as caught:
                error = caught
                self._loop.call_soon_threadsafe(lambda: self._miss_lease(error))
            else:
                self._loop.call_soon_threadsafe(lambda: self._advance(answer))

        threading.Thread(target=call, name="rendezvous-lease", daemon=True).start()

    def _miss_lease(self, error: StoreError | OSError) -> None:
        name = self._place.name
        if isinstance(error, StoreTokenError) and not self._outage.was_reached:
            self._owner.deliver(Refused(str(error)))
        elif isinstance(error, StoreAccessError):
            self._owner.deliver(Lost("rendezvous", f"the store at {name}: {error}"))
        elif not isinstance(error, StoreError):
            self._owner.deliver(Lost("rendezvous", f"this node can't listen for other nodes: {error}"))
        else:
            news = self._outage.failed(name, error)
            if news is not None:
                self._owner.deliver(news)
            self._advance(discovering.Answer(LEASE_STORE, SILENT))


def _discard(connected: socket.socket) -> None:
    """Close a connection that nobody needs; its end must not look like the death of this node."""
    with suppress(OSError):
        connected.sendall(encode_frame(MESSAGE, PARTING))
    connected.close()
