"""One term of a node as the coordinator: a thread, as a generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_run.core.job import coordinator as core
from elastic_run.core.job import coordinator_slots as slots
from elastic_run.core.job.coordinator_state import KEPT_SLOTS
from elastic_run.core.job.snapshot import find_newest_state
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol.job_keys import HEAD, LOG_START, copy_key, decision_key, state_key
from elastic_run.core.protocol.log_start import is_trimmed
from tests.simulation.clockwork import StoreLost
from tests.simulation.store import Pause, Request
from tests.simulation.threads import create_slot, raise_start

if TYPE_CHECKING:
    from collections.abc import Generator

    from elastic_run.core.job.coordinator_state import Cleanup, Coordinator
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store


def coordinate(
    agent: Agent, command: node_messages.Coordinate, orders: list[str], store: Store | None
) -> Generator[Request | Pause, Any, None]:
    """Decide, until another does or the job is over.

    Args:
        agent: The node.
        command: What its member said.
        orders: What the member says meanwhile: `stop`, `resign`.
        store: The store in which the term was claimed.
    """
    known = yield from _start_term(agent, command, store)
    interval = agent.world.config.keep_alive_interval
    next_heartbeats = agent.clock.now() + interval
    has_resigned = False
    beating: set[str] | None = None
    while not known.is_over and "stop" not in orders:
        if "resign" in orders and not has_resigned:
            known, has_resigned = core.resign(known), True
        try:
            proposal = slots.propose(known, agent.clock.now())
            if proposal is not None:
                yield Request("write", (proposal.documents,))
                winner, start = yield from create_slot(proposal.slot, proposal.entry)
                now, jitter = agent.clock.now(), agent.random.random()
                known, cleanup = slots.settle(known, winner, now=now, jitter=jitter, log_start=start)
                yield from _clean_up(cleanup)
                known = slots.garbage_deleted(known)
            elif (unfinished := slots.unfinished_cleanup(known)) is not None:
                yield from _clean_up(unfinished)
                known = slots.garbage_deleted(known)
            elif known.wants is not None:
                (copy,) = yield Request("get", ([copy_key(known.wants)],))
                known = core.take_copy(known, copy, now=agent.clock.now(), jitter=agent.random.random())
            elif agent.clock.now() >= next_heartbeats:
                heartbeats = yield Request("read_heartbeats", (known.watched,))
                beating = yield from _forget_heartbeats(known, beating)
                known = core.observe(known, heartbeats, now=agent.clock.now(), jitter=agent.random.random())
                next_heartbeats = agent.clock.now() + interval
                known = core.check(known, *(yield Request("get", ([HEAD, LOG_START],))))
                if not known.is_over:
                    yield Request("write", (core.make_documents(known, agent.clock.now()),))
            else:
                until = min(next_heartbeats, known.wait_until or next_heartbeats)
                timeout = until - agent.clock.now()
                entries, position = yield Request("read", (known.position,), timeout)
                known = core.receive(known, entries, position, now=agent.clock.now(), jitter=agent.random.random())
                wake = known.wait_until
                assert known.pending or known.wants or wake is None or wake > agent.clock.now(), "it would never wait"
        except StoreLost:
            yield Pause(0.2)
            known = core.interrupted(known, agent.clock.now())
    _tell_end(agent, known, store)


def _tell_end(agent: Agent, known: Coordinator, store: Store | None) -> None:
    """Tell the member that another decides, unless it has gone to another store."""
    if known.is_superseded and store is not None and agent.store is not None and store.birth == agent.store.birth:
        agent.feed(node_messages.TermEnded(known.term))


def _start_term(
    agent: Agent, command: node_messages.Coordinate, store: Store | None
) -> Generator[Request | Pause, Any, Coordinator]:
    state: bytes | None = None
    if command.state_slot >= 0:
        while True:
            try:
                (state,) = yield Request("get", ([state_key(command.state_slot, command.state_term)],))
                state = state or b""
                break
            except StoreLost:
                yield Pause(0.2)
    known = core.start_term(
        agent.node,
        term=command.term,
        slot=command.slot,
        state=state,
        now=agent.clock.now(),
        jitter=agent.random.random(),
        is_successor=agent.connection.rank > 0,
        known_round=command.known_round,
        newest_round=command.newest_round,
        known_restarts=command.known_restarts,
        silent=command.silent,
        last_heartbeat=command.last_heartbeat,
        kept_slots=agent.world.kept_slots,
        store_id="" if store is None else store.birth,
    )
    while core.has_lost_state(known):
        try:
            known = core.take_backup(known, (yield from _read_newest_state(command.slot)), agent.clock.now())
            entries, position = yield Request("read", (known.position,), 0.0)
            (log_start,) = yield Request("get", ([LOG_START],))
        except StoreLost:
            yield Pause(0.2)
            continue
        known = core.skip(known, entries, position, log_start)
        if not entries:
            break
    return known


def _read_newest_state(end: int) -> Generator[Request | Pause, Any, bytes | None]:
    """As `decision_log.read_newest_state`."""
    slots_before = range(max(0, end - KEPT_SLOTS), end)
    entries = yield Request("get", ([decision_key(slot) for slot in slots_before],))
    state: bytes | None
    (state,) = yield Request("get", ([find_newest_state(zip(slots_before, entries, strict=True))],))
    return state


def _clean_up(cleanup: Cleanup) -> Generator[Request | Pause, Any, None]:
    yield Request("write", (cleanup.documents,))
    expected = {**cleanup.expected}
    if cleanup.log_start is not None:
        there = expected[LOG_START] = yield from raise_start(cleanup.log_start)
        if not is_trimmed(cleanup.log_start.slot - 1, there):
            return
    yield Request("delete_where", (cleanup.deleted, expected))
    if cleanup.trimmed is not None:
        yield Request("trim", (cleanup.trimmed,))


def _forget_heartbeats(known: Coordinator, beating: set[str] | None) -> Generator[Request | Pause, Any, set[str]]:
    """Remove the heartbeats of those that are gone; returns who may have some now."""
    watched = {*known.watched, *(refusal.node for refusal in known.job.refusals)}
    if watched != beating:
        yield Request("forget_heartbeats", (sorted({*(beating or ()), *known.job.gone} - watched),))
    return watched
