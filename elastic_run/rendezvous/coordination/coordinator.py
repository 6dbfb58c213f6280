"""One agent's port, and the coordination of its job while it coordinates: what the nodes say in, each node's order out.

- A thread with a loop of its own, so that no workers wait for it.
- `core.job.coordination` decides about many documents at a time. A node is sent its order when it differs from the one
  before.
- Where a lease says who coordinates, it is renewed from here.
- An agent that has a port and doesn't coordinate says whom it follows, or that it searches.
"""

from __future__ import annotations

import os
import threading
import time

from elastic_run.core.job import coordination as rules
from elastic_run.core.job.codec import MessageError, encode, from_document, to_message
from elastic_run.core.job.coordination import describe_wait, list_left_out, make_order
from elastic_run.core.job.coordinator_search import COORDINATES, FOLLOWS, SEARCHES, compute_standing
from elastic_run.core.job.documents import GATHER, NodeState, Order, Promise
from elastic_run.core.job.founding import LEASE
from elastic_run.core.job.round_ending import end_job
from elastic_run.core.job.state import BROKEN, Closed, Said, StepDown
from elastic_run.loop import Loop
from elastic_run.records import dataclass, replace
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.listener import Listener
from elastic_run.rendezvous.coordination.opening import Answer
from elastic_run.rendezvous.coordination.questions import Questions
from elastic_run.rendezvous.events import Lost

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.core.job.documents import Round
    from elastic_run.core.job.state import Event, Job
    from elastic_run.loop import Timer
    from elastic_run.rendezvous.coordination.opening import Hello, Identity
    from elastic_run.rendezvous.coordination.places import LeasePlace
    from elastic_run.rendezvous.events import SessionEvent

#: A decision waits for this multiple of the CPU time that the last one took, unless nobody else is waited for: so a
#: thousand nodes cost few decisions.
_REST = 6.0
_LONGEST_REST = 0.25
#: Seconds for the thread to end, which never blocks.
_END_LIMIT = 10.0


@dataclass(slots=True)
class _Connected:
    """A node that is connected, its machine, and the order that it was sent last."""

    link: Link
    host: str
    sent: Order


class Coordinator:
    """One agent's port, and its job while it coordinates.

    The workers' store may be at the same port (`serves_workers`); it is emptied before each round. `call` makes a call
    in the loop of this agent's node: of `on_standing` when the job's standing has changed, and of `on_event`.
    """

    def __init__(
        self,
        identity: Identity,
        sockets: Sequence[_socket.socket],
        *,
        serves_workers: bool,
        call: Callable[[Callable[[], None]], None],
        on_standing: Callable[[int], None],
        on_event: Callable[[SessionEvent], None],
    ) -> None:
        self._identity = identity
        self._node = identity.node
        self._call_node = call
        self._on_standing = on_standing
        self._on_event = on_event
        self._loop = Loop()
        self._is_over = False
        self.answer = Answer(SEARCHES, identity.node)  # whom this agent follows, while it doesn't coordinate
        self._state: Job | None = None  # None while this agent doesn't coordinate
        self._is_ready = False  # whether it has heard what its own node knows of the job
        self._standing = -1
        self._started_by: tuple[Round, ...] = ()
        self._connected: dict[str, _Connected] = {}
        self._events: list[Event] = []
        self._changed: set[str] = set()
        self._unanswered: set[str] = set()  # nodes that were sent an order, and have said nothing since
        self._due: Timer | None = None
        self._timer: Timer | None = None
        self._rest_until = 0.0
        self._complaint = ""
        self._questions = Questions(self._loop)
        self._clear_workers: Callable[[], None] = lambda: None
        self._on_change: Callable[[], None] = lambda: None
        hand_on = self._open_worker_store(sockets[0]) if serves_workers else None
        self._listener = Listener(
            self._loop, sockets, identity=identity, describe=self._describe_self, admit=self._welcome, hand_on=hand_on
        )
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _open_worker_store(self, listening: _socket.socket) -> Callable[[_socket.socket, tuple[str, int]], None]:
        from elastic_run.store.server import StoreServer

        server = StoreServer(self._loop, listening, is_fed=True)
        self._clear_workers = server.reset
        return server.serve

    def _run(self) -> None:
        try:
            self._loop.run_until(lambda: self._is_over)
        except Exception as caught:
            import logging

            logging.getLogger(__name__).exception("a defect in the rendezvous, thread coordinator")
            self._tell(Lost("internal_error", f"a defect in the rendezvous: {caught!r}"))
        finally:
            self._end_term()
            self._listener.close()
            self._loop.close()

    # --- calls of other threads --------------------------------------------------------------------------------------
    def begin(self, job: Job, own: socket.socket, lease: LeasePlace | None) -> None:
        """Coordinate the job from now on, over a connection to this agent's own node; `lease` is to be renewed."""

        def start() -> None:
            self._end_term()
            self._state = replace(job, started_by=self._started_by)
            self._standing = -1
            self._is_ready = False
            link = Link(self._loop, own, lease=self._identity.lease)
            self._admit(self._node, self._identity.host, link, job.promise.term)
            if lease is not None:
                lease.keep(self._loop, lambda: self._state is not None, self.note, self._tell)

        self._loop.call_soon_threadsafe(start)

    def note(self, event: Event) -> None:
        """Take in an event that no node brings, such as `MayFound`."""
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    def end_term(self) -> None:
        """Coordinate no longer: the nodes come again, here or elsewhere. Harmless if this agent does not coordinate."""
        self._loop.call_soon_threadsafe(self._end_term)

    def end_job(self, detail: str) -> None:
        """Let the job end with this agent, which goes, for a reason: a sentence."""

        def end() -> None:
            state = self._state
            if state is not None and not state.is_over and state.end is None:
                self._state = end_job(state, "store_lost", detail)
                self._changed.update(self._connected)
                self._send_orders(self._state)

        self._loop.call_soon_threadsafe(end)

    def wait_others(self, timeout: float, *, are_there: bool) -> bool:
        """Wait until another node is connected, or none is; returns whether that is so."""
        has_come = threading.Event()

        def look() -> None:
            if bool(self.hosts_of_others) is are_there:
                has_come.set()

        def begin() -> None:
            self._on_change = look
            look()

        self._loop.call_soon_threadsafe(begin)
        return has_come.wait(timeout)

    @property
    def hosts_of_others(self) -> list[str]:
        """The machines of the other nodes that are connected."""
        return [one.host for node, one in tuple(self._connected.items()) if node != self._node]

    @property
    def has_heirs(self) -> bool:
        """Whether other nodes are connected that stay."""
        state = self._state
        return state is not None and any(node != self._node and not one.leaving for node, one in state.here.items())

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; see `core.job.coordination`."""
        state = self._state
        return [] if state is None else list_left_out(state, time.monotonic())

    def close(self) -> None:
        """Close the port and all connections, and end the thread; harmless when closed."""

        def end() -> None:
            self._is_over = True

        self._loop.call_soon_threadsafe(end)
        self._thread.join(_END_LIMIT)

    def _tell(self, event: SessionEvent) -> None:
        self._call_node(lambda: self._on_event(event))

    # --- nodes come and go -------------------------------------------------------------------------------------------
    def _describe_self(self) -> Answer:
        state = self._state
        if state is not None and not state.is_over and self._is_ready:
            return Answer(COORDINATES, self._node, compute_standing(state), state.promise.term)
        # Before the coordinator has heard what its own node knows, it would seem to know of no job.
        return self.answer if self.answer.role == FOLLOWS else replace(self.answer, role=SEARCHES)

    def _welcome(self, hello: Hello, link: Link, term: int) -> None:
        state = self._state
        if not hello.successor:
            self._admit(hello.node, hello.host, link, term)
            return
        link.close()
        if state is not None and state.choice == LEASE and hello.term > state.promise.term:
            self._feed(StepDown(hello.successor))

    def _admit(self, node: str, host: str, link: Link, term: int) -> None:
        """Take the connection of a node, which was told the term, in place of one that it had before."""
        former = self._connected.get(node)
        if former is not None:
            former.link.close()  # the node has come again before this side knew that the connection had broken
        self._connected[node] = _Connected(link, host, Order(Promise(term, self._node), GATHER))  # it was told no more
        self._on_change()
        link.defers = True
        link.on_document = lambda document: self._read_state(node, link, document)
        link.on_message = lambda message: self._read_message(node, link, message)
        link.on_end = lambda how, detail: self._lose(node, how, detail)

    def _read_state(self, node: str, link: Link, document: dict[str, Any]) -> None:
        try:
            state = from_document(NodeState, {**document, "node": node})
        except MessageError as error:
            if not self._complaint:
                self._complaint = str(error)
                import logging

                logging.getLogger(__name__).warning(
                    "elastic-run: %s sends what is no state of a node: %s", self._connected[node].host, error
                )
            link.close()
            self._lose(node, BROKEN, "unreadable")
            return
        self._feed(Said(state))

    def _read_message(self, node: str, link: Link, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "wait" and self._state is not None:
            status = describe_wait(self._state, time.monotonic())
            link.send({"kind": "wait", "status": to_message(status)})
        elif kind == "ask":
            self._questions.ask(link, message, {name: one.link for name, one in self._connected.items()})
        elif kind == "answer":
            self._questions.answer(node, message)

    def _lose(self, node: str, how: str, detail: str) -> None:
        self._connected.pop(node, None)
        self._unanswered.discard(node)
        self._questions.lose(node)
        self._feed(Closed(node, how, detail))
        self._on_change()

    def _end_term(self) -> None:
        if self._state is not None:
            self._started_by = self._state.started_by
        self._state = None
        for one in tuple(self._connected.values()):
            one.link.part()
        for each in (self._connected, self._events, self._unanswered):
            each.clear()
        self._questions.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._on_change()

    # --- decisions ---------------------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        """Take in an event."""
        self._events.append(event)
        now = self._loop.now()
        if isinstance(event, Said):
            self._changed.add(event.state.node)
            if self._is_last(event.state.node) and self._due is not None:
                self._rest_until = now
                self._due.cancel()
                self._due = None
        if self._due is None:
            # After all documents of this turn; later where the last decision took long and nodes have yet to answer it.
            self._due = self._loop.call_at(max(self._rest_until, now), self._decide)

    def _is_last(self, node: str) -> bool:
        """Whether nobody else is waited for now that a node has said something."""
        if node in self._unanswered:
            self._unanswered.discard(node)
            return not self._unanswered
        state = self._state
        if state is None or state.config is None:
            return False
        return len(self._events) + len(state.here) == state.config.max_nodes

    def _wake(self) -> None:
        if self._due is None:
            self._decide()

    def _decide(self) -> None:
        self._due = None
        before = self._state
        if before is None:
            self._events.clear()
            return
        began, spent = time.monotonic(), time.thread_time()
        events, self._events = self._events, []
        jitter = int.from_bytes(os.urandom(2), "big") / 65536
        state = self._state = rules.decide(before, events, now=began, jitter=jitter)
        self._is_ready = self._is_ready or self._node in state.here or self._node in state.gone  # or it leaves
        if state.round != before.round:
            # Each member has accepted the round, so nothing of the last one lives anywhere.
            self._clear_workers()
        if not _is_same_for_all(before, state):
            self._changed.update(self._connected)
        self._send_orders(state)
        standing = compute_standing(state)
        if standing != self._standing:
            self._standing = standing
            self._call_node(lambda: self._on_standing(standing))
        now = time.monotonic()
        self._rest_until = now + min(_LONGEST_REST, _REST * (time.thread_time() - spent))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = rules.next_at(state, now)
        if due is not None:
            self._timer = self._loop.call_at(due, self._wake)

    def _send_orders(self, state: Job) -> None:
        changed, self._changed = self._changed, set()
        last, content = None, b""
        for node in changed:
            one = self._connected.get(node)
            if one is None:
                continue
            is_refused = any(refusal.node == node for refusal in state.refusals)
            if node in state.here or node in state.gone or is_refused or state.is_over or state.end is not None:
                order = make_order(state, node)
                if order != one.sent:
                    one.sent = order
                    self._unanswered.add(node)
                    if order != last:  # but for proposals, most nodes get the same
                        last, content = order, encode(to_message(order))
                    one.link.offer(content)
            one.link.acknowledge()


def _is_same_for_all(before: Job, after: Job) -> bool:
    """Whether only what single nodes have said may change an order."""
    names = ("promise", "round", "proposed", "halt", "end", "is_over", "memory")
    return all(getattr(before, name) is getattr(after, name) for name in names) and (
        before.phase == after.phase and before.refusals == after.refusals
    )
