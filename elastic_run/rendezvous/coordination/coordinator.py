"""The coordinator of a job, on a loop: what the nodes say goes in, and each node's order goes out.

- `core.job.coordination` decides about many documents at a time. A node is sent its order when it differs from the one
  before.
- Questions to all nodes (`status`, `stacks`, drains) pass through here.
"""

from __future__ import annotations

import logging
import os
import time

from elastic_run.core.job import coordination as rules
from elastic_run.core.job.coordination import BROKEN, Closed, Said, make_order
from elastic_run.core.job.discovery import compute_standing
from elastic_run.core.job.documents import GATHER, NodeState, Order, Promise
from elastic_run.core.job.round_outcome import verdict_exit_code
from elastic_run.core.job.wait_status import describe_wait
from elastic_run.core.protocol.codec import MessageError, encode, from_document, to_message
from elastic_run.core.protocol.facts import End
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.questions import Questions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.job.coordination import Coordination
    from elastic_run.core.job.coordination_state import Event
    from elastic_run.core.job.documents import Round
    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.link import Link

__all__ = [
    "Coordinator",
]

_log = logging.getLogger(__name__)

#: A decision waits for this multiple of the CPU time that the last one took, unless nobody else is waited for: so a
#: thousand nodes cost few decisions.
_REST = 6.0
_LONGEST_REST = 0.25


class Coordinator:
    """One agent's coordination of its job; everything happens in the loop's thread.

    Attributes:
        state: The coordination, None while this agent doesn't coordinate.
        is_ready: Whether it has heard what its own node knows of the job.
        hosts: The machines of the nodes that are connected.
        clear_workers: Empties the workers' store, where it is at this agent's port.
        on_change: Called when a node has come or gone.
    """

    def __init__(self, loop: Loop, node: str, on_standing: Callable[[int], None]) -> None:
        self.state: Coordination | None = None
        self.is_ready = False
        self.hosts: dict[str, str] = {}
        self.clear_workers: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self._loop = loop
        self._node = node
        self._on_standing = on_standing
        self._standing = -1
        self._started_by: tuple[Round, ...] = ()
        self._links: dict[str, Link] = {}
        self._sent: dict[str, Order] = {}
        self._events: list[Event] = []
        self._changed: set[str] = set()
        self._due: Timer | None = None
        self._unanswered: set[str] = set()  # nodes that were sent an order, and have said nothing since
        self._timer: Timer | None = None
        self._rest_until = 0.0
        self._complaint = ""
        self._questions = Questions(loop)

    @property
    def has_others(self) -> bool:
        """Whether other nodes are connected."""
        return any(node != self._node for node in tuple(self._links))

    # --- a term ------------------------------------------------------------------------------------------------------
    def begin(self, make: Callable[[tuple[Round, ...]], Coordination]) -> None:
        """Coordinate from now on; `make` gets the rounds that this agent has started as a coordinator before."""
        self.end()
        self.state = make(self._started_by)
        self._standing = -1
        self.is_ready = False

    def end(self) -> None:
        """Leave the job: its nodes come again, here or elsewhere. Harmless where this agent doesn't coordinate."""
        if self.state is not None:
            self._started_by = self.state.started_by
        self.state = None
        for link in tuple(self._links.values()):
            link.part()
        for one in (self._links, self.hosts, self._sent):
            one.clear()
        self._events.clear()
        self._unanswered.clear()
        self._questions.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.on_change()

    def end_job(self, detail: str) -> None:
        """Let the job end with this agent, which goes, for a reason: a sentence."""
        state = self.state
        if state is None or state.is_over or state.end is not None:
            return
        attempts = state.job.attempts
        end = End(state.job.term, "store_lost", verdict_exit_code("store_lost"), detail, None, attempts)
        self.state = replace(state, end=end)
        self._changed.update(self._links)
        self._send_orders()

    # --- nodes -------------------------------------------------------------------------------------------------------
    def admit(self, node: str, host: str, link: Link, term: int) -> None:
        """Take the connection of a node, in place of one that it had before.

        The node was told the term, and promises to follow it with its first state.
        """
        former = self._links.get(node)
        if former is not None:
            former.close()  # the node has come again before this side knew that the connection had broken
        self._links[node] = link
        self.hosts[node] = host
        self._sent[node] = Order(Promise(term, self._node), GATHER)  # nothing else was told so far
        link.defers = True
        self.on_change()
        link.on_document = lambda document: self._read_state(node, link, document)
        link.on_message = lambda message: self._read_message(node, link, message)
        link.on_end = lambda how, detail: self._lose(node, how, detail)

    def _read_state(self, node: str, link: Link, document: dict[str, Any]) -> None:
        try:
            state = from_document(NodeState, {**document, "node": node})
        except MessageError as error:
            if not self._complaint:
                self._complaint = str(error)
                _log.warning("elastic-run: %s sends what is no state of a node: %s", self.hosts[node], error)
            link.close()
            self._lose(node, BROKEN, "unreadable")
            return
        self.feed(Said(state))

    def _lose(self, node: str, how: str, detail: str) -> None:
        self._links.pop(node, None)
        self.hosts.pop(node, None)
        self._sent.pop(node, None)
        self._unanswered.discard(node)
        self._questions.lose(node)
        self.feed(Closed(node, how, detail))
        self.on_change()

    def _read_message(self, node: str, link: Link, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "wait" and self.state is not None:
            status = describe_wait(self.state, time.monotonic())
            link.send({"kind": "wait", "status": to_message(status)})
        elif kind == "ask":
            self._questions.ask(link, message, self._links)
        elif kind == "answer":
            self._questions.answer(node, message)

    # --- decisions ---------------------------------------------------------------------------------------------------
    def feed(self, event: Event) -> None:
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
        config = None if self.state is None else self.state.job.config
        return config is not None and len(self._events) + len(self.state.here) == config.max_nodes  # type: ignore[union-attr]

    def _wake(self) -> None:
        if self._due is None:
            self._decide()

    def _decide(self) -> None:
        self._due = None
        before = self.state
        if before is None:
            self._events.clear()
            return
        began, spent = time.monotonic(), time.thread_time()
        events, self._events = self._events, []
        jitter = int.from_bytes(os.urandom(2), "big") / 65536
        state = self.state = rules.decide(before, events, now=began, jitter=jitter)
        self.is_ready = self.is_ready or self._node in state.here or self._node in state.ended  # or it leaves
        if state.round != before.round:
            # Each member has accepted the round, so nothing of the last one lives anywhere.
            self.clear_workers()
        if not _is_same_for_all(before, state):
            self._changed.update(self._links)
        self._send_orders()
        self._tell_standing(state)
        now = time.monotonic()
        self._rest_until = now + min(_LONGEST_REST, _REST * (time.thread_time() - spent))
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
        state = self.state
        changed, self._changed = self._changed, set()
        if state is None:
            return
        last, content = None, b""
        for node in changed:
            link = self._links.get(node)
            if link is None:
                continue
            if node in state.here or state.is_over or state.end is not None or _knows(state, node):
                order = make_order(state, node)
                if order != self._sent[node]:
                    self._sent[node] = order
                    self._unanswered.add(node)
                    if order != last:  # but for proposals, most nodes get the same
                        last, content = order, encode(to_message(order))
                    link.offer(content)
            link.acknowledge()


def _knows(state: Coordination, node: str) -> bool:
    return any(refusal.node == node for refusal in state.job.refusals) or node in state.ended


def _is_same_for_all(before: Coordination, after: Coordination) -> bool:
    """Whether only what single nodes have said may change an order."""
    names = ("promise", "round", "proposed", "halt", "end", "is_over", "memory")
    job, later = before.job, after.job
    return all(getattr(before, name) is getattr(after, name) for name in names) and (
        job.phase == later.phase and job.refusals == later.refusals
    )
