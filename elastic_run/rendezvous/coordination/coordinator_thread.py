"""The coordinator of a job, and an agent's port: a thread with a loop of its own, so that no workers wait for it.

- What the nodes say goes into `core.job.coordination.decide`, many documents at a time; each node is sent its order
  when it differs from the one before.
- An agent that has a port and doesn't coordinate says whom it follows, or that it searches.
- Questions to all nodes (`status`, `stacks`, drains) pass through here: the question goes to each node, and the answers
  go back together, at the latest when the asker's time is over.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from elastic_run.core.job import coordination as rules
from elastic_run.core.job.coordination import BROKEN, Closed, Said, StepDown, make_order
from elastic_run.core.job.discovery import COORDINATES, SEARCHES, compute_standing
from elastic_run.core.job.documents import NodeState, Promise
from elastic_run.core.job.host_lists import list_hosts
from elastic_run.core.job.reported_failure import verdict_exit_code
from elastic_run.core.job.succession import LEASE
from elastic_run.core.job.wait_status import describe_wait
from elastic_run.core.protocol.codec import MessageError, from_document, to_document
from elastic_run.core.protocol.decisions import End
from elastic_run.loop import Loop
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.left_out_nodes import list_left_out
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.listener import Listener
from elastic_run.rendezvous.coordination.opening import Answer
from elastic_run.rendezvous.coordination.questions import Questions

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.core.job.coordination import Coordination
    from elastic_run.core.job.coordination_state import Event
    from elastic_run.core.job.documents import Order, Round
    from elastic_run.loop import Timer
    from elastic_run.rendezvous.coordination.opening import Hello, Identity

__all__ = ["CoordinatorThread"]

_log = logging.getLogger(__name__)

#: Seconds after which the end of a job tells that it waits for nodes that don't know it.
_MOMENT = 1.0
#: A decision waits this part of the time that the last one took, so that a thousand nodes cost few decisions.
_REST = 2.0
_LONGEST_REST = 0.25
_CALL_LIMIT = 10.0


class CoordinatorThread:
    """One agent's port, and its job while it coordinates.

    Args:
        identity: This agent.
        on_standing: Called with the standing of this agent's coordination when it has changed.
        on_defect: Called with what went wrong if the thread ends because of a defect.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        on_standing: Callable[[int], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._node = identity.node
        self._on_standing = on_standing
        self._on_defect = on_defect
        self._standing = -1
        self._loop = Loop()
        self._is_over = False
        self._listener: Listener | None = None
        self._coordination: Coordination | None = None
        self._answer = Answer(SEARCHES, identity.node)
        self._started_by: tuple[Round, ...] = ()
        self._links: dict[str, Link] = {}
        self._hosts: dict[str, str] = {}
        self._sent: dict[str, Order] = {}
        self._events: list[Event] = []
        self._changed: set[str] = set()
        self._is_due = False
        self._timer: Timer | None = None
        self._rest_until = 0.0
        self._clear_workers: Callable[[], None] | None = None
        self._when_empty: Callable[[], None] | None = None
        self._when_others: Callable[[], None] | None = None
        self._complaint = ""
        self._questions = Questions(self._loop)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    # --- calls of other threads --------------------------------------------------------------------------------------
    def listen(self, sockets: Sequence[_socket.socket], *, serves_workers: bool = False) -> int:
        """Open this agent's port; returns it.

        Args:
            sockets: Listening sockets of one port.
            serves_workers: Whether the workers' store is at the same port: then it is emptied before each round.
        """
        port = int(sockets[0].getsockname()[1])

        def begin() -> None:
            hand_on = self._open_worker_store(sockets) if serves_workers else None
            self._listener = Listener(
                self._loop,
                sockets,
                identity=self._identity,
                describe=self._describe_self,
                admit=self._welcome,
                hand_on=hand_on,
            )

        self._call(begin)
        return port

    def begin(self, promise: Promise, choice: str, own: socket.socket, *, dead: str, may_found: bool) -> None:
        """Coordinate the job from now on.

        Args:
            promise: The term, and this node.
            choice: A word of `core.job.succession`.
            own: This side of the connection to this agent's own node.
            dead: See `Knowledge.dead`.
            may_found: Whether nodes that know of no round may found the job.
        """

        def start() -> None:
            self._drop_all()
            state = rules.begin(promise, choice, time.monotonic(), dead=dead, started_by=self._started_by)
            self._coordination = replace(state, may_found=may_found)
            self._standing = -1
            link = Link(
                self._loop,
                own,
                lease=self._identity.lease,
                on_document=lambda _: None,
                on_message=lambda _: None,
                on_end=lambda _how, _detail: None,
            )
            self._admit(self._node, self._identity.host, link)

        self._call(start)

    def note(self, event: Event) -> None:
        """Take in an event that no node brings, such as `MayFound`."""
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    def end_term(self) -> None:
        """Coordinate no longer; harmless when this agent does not coordinate."""
        self._call(self._drop_all)

    def set_answer(self, answer: Answer) -> None:
        """Say from now on whom this agent follows, or that it searches, while it doesn't coordinate."""

        def begin() -> None:
            self._answer = answer

        self._loop.call_soon_threadsafe(begin)

    def resign(self, *, ends_job: str) -> None:
        """Let the nodes go on without this agent, which goes.

        Args:
            ends_job: Why the job ends with this agent, a sentence; "" where another coordinator may follow.
        """

        def resign() -> None:
            state = self._coordination
            if state is None or state.is_over or state.end is not None:
                return
            if ends_job:
                end = End(
                    state.job.term, "store_lost", verdict_exit_code("store_lost"), ends_job, None, state.job.attempts
                )
                self._coordination = replace(state, end=end)
            else:
                self._coordination = replace(state, is_over=True)
            self._changed.update(self._links)
            self._send_orders()

        self._call(resign)

    def wait_empty(self, timeout: float) -> bool:
        """Wait until no other node is connected; returns whether that is so."""
        is_empty = threading.Event()

        def look() -> None:
            self._when_empty = is_empty.set
            self._look_whether_empty()

        self._call(look)
        return is_empty.wait(timeout)

    def wait_others(self, timeout: float) -> bool:
        """Wait until another node is connected; returns whether one is."""
        has_come = threading.Event()

        def look() -> None:
            self._when_others = has_come.set
            if self.has_others:
                has_come.set()

        self._call(look)
        return has_come.wait(timeout)

    def wait_known(self, timeout: float) -> None:
        """Wait until each node that is connected has gone with the verdict; a line tells of the wait."""
        if self.wait_empty(min(_MOMENT, timeout)):
            return
        left = timeout - _MOMENT
        if left > 0:
            hosts = sorted(host for node, host in tuple(self._hosts.items()) if node != self._node)
            _log.warning(
                "elastic-run: the job is over; waiting up to %.0f s for nodes that do not know it yet: %s",
                left,
                ", ".join(list_hosts(hosts)),
            )
            self.wait_empty(left)

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; see `left_out_nodes`."""
        state = self._coordination
        return [] if state is None else list_left_out(state.job, time.monotonic())

    @property
    def has_others(self) -> bool:
        """Whether other nodes are connected."""
        return any(node != self._node for node in tuple(self._links))

    def close(self) -> None:
        """Close the port and all connections, and end the thread; harmless when closed."""
        if not self._is_over:
            self._call(self._end)
            self._thread.join(_CALL_LIMIT)

    def _end(self) -> None:
        self._is_over = True

    def _call(self, function: Callable[[], None]) -> None:
        """Call in the loop's thread, and wait until that is done."""
        is_done = threading.Event()

        def call() -> None:
            try:
                function()
            finally:
                is_done.set()

        self._loop.call_soon_threadsafe(call)
        is_done.wait(_CALL_LIMIT)

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._loop.run_until(lambda: self._is_over)
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent is told
            _log.exception("a defect in the rendezvous, thread coordinator")
            self._is_over = True
            self._on_defect(error)
        finally:
            self._drop_all()
            if self._listener is not None:
                self._listener.close()
            self._loop.close()

    def _open_worker_store(
        self, sockets: Sequence[_socket.socket]
    ) -> Callable[[_socket.socket, tuple[str, int]], None]:
        from elastic_run.store.tcpstore.server import StoreServer  # noqa: PLC0415 - only where the port is shared

        server = StoreServer(self._loop, sockets[0], separates_groups=True, is_fed=True)
        self._clear_workers = server.reset
        return server.take

    # --- nodes -------------------------------------------------------------------------------------------------------
    def _describe_self(self) -> Answer:
        state = self._coordination
        if state is None or state.is_over:
            return self._answer
        return Answer(COORDINATES, self._node, compute_standing(state))

    def _welcome(self, hello: Hello, link: Link) -> None:
        state = self._coordination
        if not hello.successor:
            self._admit(hello.node, hello.host, link)
            return
        link.close()
        if state is not None and state.choice == LEASE and hello.term > state.promise.term:
            self._feed(StepDown(hello.successor))

    def _admit(self, node: str, host: str, link: Link) -> None:
        former = self._links.get(node)
        if former is not None:
            former.close()  # the node has come again before this side knew that the connection had broken
        self._links[node] = link
        self._hosts[node] = host
        self._sent.pop(node, None)
        if self._when_others is not None and self.has_others:
            self._when_others()
        link.on_document = lambda document: self._read_state(node, link, document)
        link.on_message = lambda message: self._read_message(node, link, message)
        link.on_end = lambda how, detail: self._lose(node, how, detail)

    def _read_state(self, node: str, link: Link, document: dict[str, Any]) -> None:
        try:
            state = from_document(NodeState, {**document, "node": node})
        except MessageError as error:
            if not self._complaint:
                self._complaint = str(error)
                _log.warning("elastic-run: %s sends what is no state of a node: %s", self._hosts[node], error)
            link.close()
            self._lose(node, BROKEN, "unreadable")
            return
        self._feed(Said(state))

    def _lose(self, node: str, how: str, detail: str) -> None:
        self._links.pop(node, None)
        self._hosts.pop(node, None)
        self._sent.pop(node, None)
        self._questions.lose(node)
        self._feed(Closed(node, how, detail))
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if self._when_empty is not None and not self.has_others:
            self._when_empty()
            self._when_empty = None

    def _read_message(self, node: str, link: Link, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "wait" and self._coordination is not None:
            status = describe_wait(self._coordination, time.monotonic())
            link.send({"kind": "wait", "status": to_document(status)})
        elif kind == "ask":
            self._questions.ask(link, message, self._links)
        elif kind == "answer":
            self._questions.answer(node, message)

    def _drop_all(self) -> None:
        """Leave the job: its nodes come again, here or elsewhere."""
        if self._coordination is not None:
            self._started_by = self._coordination.started_by
        self._coordination = None
        for link in tuple(self._links.values()):
            link.part()
        for one in (self._links, self._hosts, self._sent):
            one.clear()
        self._events.clear()
        self._questions.clear()
        self._look_whether_empty()
        if self._timer is not None:
            self._timer.cancel()

    # --- decisions ---------------------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Said):
            self._changed.add(event.state.node)
        if not self._is_due:
            self._is_due = True
            # After all documents of this turn; later where the last decision took long.
            self._loop.call_at(max(self._rest_until, self._loop.now()), self._decide)

    def _wake(self) -> None:
        if not self._is_due:
            self._decide()

    def _decide(self) -> None:
        self._is_due = False
        before = self._coordination
        if before is None:
            self._events.clear()
            return
        began = time.monotonic()
        events, self._events = self._events, []
        jitter = int.from_bytes(os.urandom(2), "big") / 65536
        state = self._coordination = rules.decide(before, events, now=began, jitter=jitter)
        if state.round != before.round and self._clear_workers is not None:
            # Each member has accepted the round, so nothing of the last one lives anywhere.
            self._clear_workers()
        if not _is_same_for_all(before, state):
            self._changed.update(self._links)
        self._send_orders()
        self._tell_standing(state)
        now = time.monotonic()
        self._rest_until = now + min(_LONGEST_REST, _REST * (now - began))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = rules.next_at(state, now)
        if due is not None:
            self._timer = self._loop.call_at(due, self._wake)

    def _tell_standing(self, state: Coordination) -> None:
        standing = compute_standing(state)
        if standing != self._standing:
            self._standing = standing
            self._on_standing(standing)

    def _send_orders(self) -> None:
        state = self._coordination
        changed, self._changed = self._changed, set()
        if state is None:
            return
        for node in changed:
            link = self._links.get(node)
            if link is None or not (
                node in state.here or state.is_over or state.end is not None or _knows(state, node)
            ):
                continue
            order = make_order(state, node)
            if order != self._sent.get(node):
                self._sent[node] = order
                link.offer(to_document(order))


def _knows(state: Coordination, node: str) -> bool:
    return any(refusal.node == node for refusal in state.job.refusals) or node in state.ended


def _is_same_for_all(before: Coordination, after: Coordination) -> bool:
    """Whether only what single nodes have said may change an order."""
    names = ("promise", "round", "assignments", "proposed", "halt", "end", "is_over", "memory")
    job, later = before.job, after.job
    return all(getattr(before, name) is getattr(after, name) for name in names) and (
        job.phase == later.phase and job.refusals == later.refusals
    )
