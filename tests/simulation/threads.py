"""The threads of a node: one speaks, one follows the log, one does what the member asks for; each as a generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_run.core.job.snapshot import identify
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import BEGINNING, LEAVING, READY, WAITING
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.job_keys import (
    HEAD,
    LOG_START,
    assignment_key,
    copy_key,
    decision_key,
    state_key,
)
from elastic_run.core.protocol.log_start import find_restart, find_start, is_raised_by, is_trimmed
from elastic_run.core.protocol.messages import LogStart, read_head, to_json
from tests.simulation.clockwork import StoreLost
from tests.simulation.store import SPOILT, Pause, Request

if TYPE_CHECKING:
    from collections.abc import Generator

    from elastic_run.core.protocol.messages import Copy, Fact
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store

#: How far a job has come in a store that tells of none.
_NOTHING = (-1, False)


# --- speaking --------------------------------------------------------------------------------------------------------
def speak(agent: Agent) -> Generator[Request | Pause, Any, None]:
    """Say the node's facts, and heartbeat."""
    interval = agent.world.config.keep_alive_interval
    next_heartbeat = agent.clock.now()
    is_greeted = False
    while not agent.is_over:
        try:
            if not is_greeted:
                yield from _greet(agent)
                is_greeted = True
                yield from _prove_predecessor(agent)
            if agent.queue:
                yield from _append(agent, agent.queue[0])
            elif agent.clock.now() >= next_heartbeat:
                written = yield from _heartbeat(agent)
                next_heartbeat = agent.clock.now() + interval
                agent.feed(written)
                yield from _look_at_coordinator(agent)
                if (place := (yield from _find_others(agent))) is not None:
                    agent.follow_store(place)
                    is_greeted = False
            else:
                yield from _idle(agent, "speaker", next_heartbeat - agent.clock.now())
        except StoreLost:
            is_greeted = False
            if not agent.connection.failed(is_refused=agent.connection.current is None):
                agent.lose_store()
                return
            yield Pause(0.2)


def _append(agent: Agent, fact: Fact) -> Generator[Request | Pause, Any, None]:
    yield Request("append", (to_json(fact),))
    if agent.queue and agent.queue[0] is fact:
        del agent.queue[0]
        agent.feed(node_messages.Appended(fact.sequence))


def _heartbeat(agent: Agent) -> Generator[Request | Pause, Any, node_messages.HeartbeatWritten]:
    """Write a heartbeat in place of the last one."""
    is_first, was_dropped = agent.last_heartbeat is None, False
    if not is_first:
        last = yield Request("heartbeat", (agent.node, agent.last_heartbeat))
        was_dropped = last is None
        agent.last_heartbeat = last or agent.last_heartbeat
    if is_first or (was_dropped and agent.member.state != LEAVING):
        agent.last_heartbeat = yield Request("heartbeat", (agent.node, None))
    return node_messages.HeartbeatWritten(was_dropped, is_first and agent.member.state == WAITING)


def _look_at_coordinator(agent: Agent) -> Generator[Request | Pause, Any, None]:
    if agent.member.watched:
        heartbeats = yield Request("read_heartbeats", ((agent.member.watched,),))
        for node, value in heartbeats.items():
            agent.feed(node_messages.CoordinatorHeartbeatRead(node, value))


def _prove_predecessor(agent: Agent) -> Generator[Request | Pause, Any, None]:
    """Say that the agent before it on this host is dead, as its record has it."""
    dead, agent.predecessor = agent.predecessor, None
    if dead is not None and agent.random.random() < 0.5:
        yield Request("append", (to_json(dead.record),))


def _greet(agent: Agent) -> Generator[Request | Pause, Any, None]:
    """Find out which store it is that answers: the one of before, or another."""
    connection = agent.connection
    if not connection.open():
        raise StoreLost
    yield Request("get", ([HEAD],))
    connection.reached()
    before = connection.bound
    is_restored = connection.has_gone_back
    start = (yield from _restart_log(agent)) if is_restored else None
    connection.bound = connection.opened
    if before is None:
        return
    if is_restored:
        agent.last_heartbeat = None
        agent.queue.clear()
        agent.feed(node_messages.StoreRestored(start))
        return
    agent.queue.clear()
    if before is connection.bound:
        agent.feed(node_messages.Interrupted())
        agent.feed(node_messages.Reconnected())
        return
    agent.asked.clear()
    agent.last_heartbeat = None
    before.hang_up(agent)
    agent.world.say(f"{agent.node} has come to the store at {connection.name}")
    agent.feed(node_messages.StoreChanged(serves_store=connection.serves_store))


def _restart_log(agent: Agent) -> Generator[Request | Pause, Any, LogStart | None]:
    """Raise the start of the log if the store has lost entries that this node has read."""
    log = agent.member.log
    slot, read = log.next_slot or 0, (log.former_entry, log.last_entry)
    *there, raw = yield Request("get", ([decision_key(slot - 2), decision_key(slot - 1), LOG_START],))
    start = find_restart(log.next_slot, log.term, read, log.restart, there=there, raw=raw)
    return None if start is None else find_start((yield from raise_start(start)))


def _find_others(agent: Agent) -> Generator[Request | Pause, Any, str | None]:
    """Look where the job has come further than in the store that this node serves, and waits at."""
    connection, now = agent.connection, agent.clock.now()
    is_waiting = agent.member.state in (WAITING, READY)
    if not (connection.serves_store and connection.others and is_waiting):
        agent.progress = None
        return None
    here = best = yield from _read_progress(connection.bound)
    if here != agent.progress:
        agent.progress, agent.unchanged_since = here, now
    if now < agent.unchanged_since + agent.world.config.lease:
        return None
    place = None
    for endpoint in connection.others:
        there = yield from _read_progress(endpoint.open_store)
        index = agent.world.endpoints.index(endpoint)
        is_first = there == here and there != _NOTHING and index < connection.rank and place is None
        if there > best or is_first:
            best, place = there, endpoint.host
    if place is not None:
        agent.progress = None
    return place


def _read_progress(store: Store | None) -> Generator[Request | Pause, Any, tuple[int, bool]]:
    try:
        if store is None:
            return _NOTHING
        (raw,) = yield Request("get", ([HEAD],), store=store)
        head = None if raw is None else read_head(raw)
    except (StoreLost, MessageError):
        return _NOTHING
    return _NOTHING if head is None else (head.round, head.is_running)


# --- following -------------------------------------------------------------------------------------------------------
def follow(agent: Agent) -> Generator[Request | Pause, Any, None]:
    """Follow the log."""
    while not agent.is_over:
        slot, store = agent.member.log.next_slot, agent.store
        try:
            if slot is None:
                yield Pause(0.05)
                yield Request("get", ([HEAD],))
                continue
            agent.awaited = slot
            value, start = yield Request("wait_beside", (decision_key(slot), LOG_START), 20.0)
            agent.awaited = None
            if store is agent.store and _feed_entry(agent, slot, value, start):
                yield from _copy_state(agent)
        except StoreLost:
            agent.awaited = None
            yield Pause(0.2)


def _feed_entry(agent: Agent, slot: int, value: bytes | None, start: bytes | None) -> bool:
    """Take in what a slot holds; returns whether that is an entry."""
    if is_trimmed(slot, start):
        agent.feed(node_messages.EntryTrimmed(slot))
    elif value is not None:
        agent.world.oracle.note_entry(agent, slot, value)
        agent.feed(node_messages.EntryRead(slot, value, start))
        return True
    return False


def _copy_state(agent: Agent) -> Generator[Request | Pause, Any, None]:
    if agent.world.config.has_successors and agent.member.job.has_view and agent.member.log.state_slot >= 0:
        key = state_key(agent.member.log.state_slot, agent.member.log.state_term)
        store = agent.store
        (state,) = yield Request("get", ([key],))
        if store is agent.store:
            is_worse = state in (None, SPOILT) or (agent.copy and identify(state).is_older_than(identify(agent.copy)))
            agent.copy = agent.copy if is_worse else state


def _tend_copy(
    agent: Agent, ask: node_messages.PrepareRejoin | node_messages.KeepState
) -> Generator[Request | Pause, Any, node_messages.RejoinPrepared | node_messages.StateKept]:
    """Renew the copy of the state, or put it into the store and offer another workers' store where no workers run."""
    if isinstance(ask, node_messages.KeepState):
        yield from _copy_state(agent)
        return node_messages.StateKept(ask.prepared)
    copy = agent.member.job.copy
    if ask.needs_copy:
        copy = None if agent.copy is None else identify(agent.copy)
        if copy is not None and agent.copy is not None:
            yield from _put_copy(copy, agent.copy)
    is_idle = agent.member.state in (BEGINNING, WAITING, READY)
    return node_messages.RejoinPrepared(copy, agent.offer() if is_idle else None)


def _put_copy(copy: Copy, document: bytes) -> Generator[Request | Pause, Any, None]:
    (there,) = yield Request("get", ([copy_key(copy)],))
    if there != document:
        yield Request("write", ({copy_key(copy): document},))


# --- errands ---------------------------------------------------------------------------------------------------------
def run_errands(agent: Agent) -> Generator[Request | Pause, Any, None]:
    """Answer what the member asks for; the real driver may do so on any thread."""
    while not agent.is_over:
        if not agent.asked:
            yield from _idle(agent, "clerk", 1000.0)
            continue
        ask = agent.asked[0]
        try:
            if isinstance(ask, node_messages.ReadHead):
                head, start = yield Request("get", ([HEAD, LOG_START],))
                event: node_messages.Event = node_messages.HeadRead(head, start)
            elif isinstance(ask, node_messages.PrepareRejoin | node_messages.KeepState):
                event = yield from _tend_copy(agent, ask)
            elif isinstance(ask, node_messages.FetchAssignment):
                yield from _copy_state(agent)
                (place,) = yield Request("get", ([assignment_key(ask.slot, ask.term, agent.node)],))
                event = node_messages.AssignmentRead(ask.slot, ask.term, place)
            elif isinstance(ask, node_messages.CreateEntry):
                winner, start = yield from create_slot(ask.slot, to_json(ask.claim))
                event = node_messages.EntryTrimmed(ask.slot)
                if winner is not None:
                    event = node_messages.EntryRead(ask.slot, winner, start)
            else:
                raise TypeError(ask)
        except StoreLost:
            yield Pause(0.2)
            continue
        if agent.asked and agent.asked[0] is ask:
            del agent.asked[0]
            agent.feed(event)


def create_slot(slot: int, value: bytes) -> Generator[Request | Pause, Any, tuple[bytes | None, bytes | None]]:
    """Create a slot; return its entry (None if the slot was trimmed) and the start of the log."""
    key = decision_key(slot)
    winner: bytes
    winner, start = yield Request("create_beside", (key, value, LOG_START))
    if not is_trimmed(slot, start):
        return winner, start
    if winner == value:
        yield Request("delete_where", ((key,), {key: value, LOG_START: start}))
    return None, start


def raise_start(start: LogStart) -> Generator[Request | Pause, Any, bytes]:
    """As `decision_log.raise_start`; returns what says where the log begins then."""
    value = to_json(start)
    there: bytes
    (there,) = yield Request("get", ([LOG_START],))
    while is_raised_by(start, there):
        there = yield Request("replace", (LOG_START, there, value))
    return there


def _idle(agent: Agent, thread_name: str, seconds: float) -> Generator[Request | Pause, Any, None]:
    thread = getattr(agent, thread_name)
    thread.is_idle = True
    yield Pause(seconds)
    thread.is_idle = False
