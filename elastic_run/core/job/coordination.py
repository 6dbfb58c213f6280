"""The coordinator of a job: what the nodes are goes in, what each node shall do comes out. Pure.

`decide(coordination, events, now=, jitter=)` takes in what has happened, and `make_order(coordination, node)` says what
a node shall do after it. The driver sends each node its order when it differs from the order that the node was sent
last.

A round
- gather -> propose -> start -> (warn) -> halt -> every member has ended -> settle: restart, change of members, or end.
- A proposal starts when all its members have accepted it. It is abandoned when one of them is away; the next one has a
  higher number.
- The round has started when the first `start` is sent, whatever arrives. A node starts workers on `start` alone.
- A coordinator that takes over adopts the newest round that has surely started (`succession`), and waits two leases for
  its members. If all of them come, the round runs on.

Nodes
- The end of a connection that agent and guardian hold together proves that nothing of the node lives: `ENDED`. A node
  that did not answer within the lease is `SILENT`. Any other end of a connection leaves the node away: it may come back
  within the lease, and nothing happens.
- A node that has promised to follow a higher coordinator makes this one take a higher term.

Leases
- A coordinator whose lease was not renewed in time starts nothing, and the round that runs goes on. It starts what all
  have accepted when the lease is renewed, and steps down when another node holds it.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.core.job import formation
from elastic_run.core.job.coordination_state import (
    BROKEN,
    ENDED,
    SILENT,
    Closed,
    Coordination,
    LeaseRenewed,
    MayFound,
    Said,
    StepDown,
    begin,
)
from elastic_run.core.job.documents import (
    END,
    GATHER,
    HALT,
    IDLE,
    PROPOSE,
    REFUSE,
    SEARCH,
    START,
    WARN,
    JobMemory,
    NodeState,
    Order,
    Promise,
    take_memory,
    write_memory,
)
from elastic_run.core.job.node_changes import NodeChanges, describe_death, describe_misfit
from elastic_run.core.job.ranks import counts_at, find_disputes
from elastic_run.core.job.round_policy import awaited_until, scale_up_at
from elastic_run.core.job.round_steps import PATIENCE, advance
from elastic_run.core.job.state import ENDED as JOB_ENDED
from elastic_run.core.job.state import GATHERING, HALTING, PAUSING, RUNNING, WARNED, Job
from elastic_run.core.job.state import SILENT as IS_SILENT
from elastic_run.core.job.succession import LEASE, ONLY_ONE, find_base
from elastic_run.core.protocol.outcomes import DIED
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_run.core.job.coordination_state import Event

_ACTIVE = frozenset((RUNNING, WARNED, HALTING))


__all__ = [
    "BROKEN",
    "ENDED",
    "SILENT",
    "Closed",
    "Coordination",
    "LeaseRenewed",
    "MayFound",
    "Said",
    "StepDown",
    "begin",
    "decide",
    "make_order",
    "next_at",
]


# --- what has happened -----------------------------------------------------------------------------------------------
def decide(coordination: Coordination, events: Iterable[Event], *, now: float, jitter: float = 0.0) -> Coordination:
    """Take in documents and ends of connections, in order, and decide; without events, decide for the time alone.

    `jitter` is a random number in [0, 1), for the pause before a restart.
    """
    if coordination.is_over:
        return coordination
    events = list(events)
    for event in events:
        if isinstance(event, (LeaseRenewed, StepDown)):
            coordination = _take_lease(coordination, event)
    after = _raise_term(_take_in(coordination, events, now), now)
    before = None
    while after != before and not after.is_over:
        before, after = after, advance(after, now, jitter)
    return _keep_memory(after, now)


def _take_in(coordination: Coordination, events: Iterable[Event], now: float) -> Coordination:
    here, ended, away = dict(coordination.here), dict(coordination.ended), dict(coordination.away)
    job, memory, may_found = coordination.job, coordination.memory, coordination.may_found
    happened: list[NodeState | Closed] = []
    config = job.config
    for event in events:
        if isinstance(event, MayFound):
            may_found = True
        elif isinstance(event, Said):
            config = config or event.state.config
            state, told = event.state, event.state.memory
            state = state if told is None else replace(state, memory=None)
            if describe_misfit(state, config, job.scripts):
                state, told = _forget_rounds(state, coordination.promise), None
            if told is not None and (memory is None or _edition(told) > _edition(memory)):
                memory, job = told, take_memory(job, told, now)
            away.pop(state.node, None)
            here[state.node] = state
            happened.append(state)
        elif isinstance(event, Closed) and (event.node in here or event.node in away):
            last = here.pop(event.node, None)
            is_told = last is not None and bool(last.leaving)
            if last is not None and (event.how == ENDED or is_told):
                ended[event.node] = last
            if event.how == BROKEN and not is_told:
                away[event.node] = now
            else:
                away.pop(event.node, None)
            happened += [] if is_told else [event]
    # A node that leaves promises this term first: then it has ended in this coordinator's hands.
    leaving = {name: state for name, state in here.items() if state.leaving and state.promise == coordination.promise}
    ended.update(leaving)
    lease = math.inf if job.config is None else job.config.lease
    overdue = [name for name, since in away.items() if now >= since + lease]
    happened += [Closed(name, SILENT, f"silent for {lease:.1f} s") for name in overdue]
    after = replace(
        coordination,
        here=MappingProxyType({name: state for name, state in here.items() if name not in leaving}),
        ended=MappingProxyType(ended),
        away=MappingProxyType({name: since for name, since in away.items() if name not in overdue}),
        may_found=may_found,
        memory=memory,
    )
    if after.proposed is not None and not all(_can_accept(after, name) for name in after.proposed.members):
        after = replace(after, proposed=None)
    return _change_nodes(after, job, happened, now)


def _forget_rounds(state: NodeState, promise: Promise) -> NodeState:
    """Return the state of a node that will be refused, without what it says of rounds and coordinators.

    That is of another job: this one would wait for the members of its round, and end when they don't come.
    """
    return replace(state, promise=promise, started=None, accepted=(), known_round=0, dead="")


def _can_accept(coordination: Coordination, name: str) -> bool:
    """Whether a member of the proposal is there, and has not started a round that this coordinator had not heard of."""
    proposed, state = coordination.proposed, coordination.here.get(name)
    if proposed is None or state is None or state.phase != IDLE:
        return False
    place = proposed.assignments[name]
    return place.group_rank != 0 or place.master == state.store_address


def _take_lease(coordination: Coordination, event: LeaseRenewed | StepDown) -> Coordination:
    if isinstance(event, StepDown):
        return replace(coordination, is_over=True, successor=event.to)
    coordination = replace(coordination, lease_until=event.until)
    # A store that has lost its data counts from the beginning again.
    return coordination if event.term <= coordination.promise.term else _take_term(coordination, event.term)


def _change_nodes(
    coordination: Coordination, job: Job, happened: Sequence[NodeState | Closed], now: float
) -> Coordination:
    base = find_base(coordination.knowledge)
    is_newer = base is not None and (coordination.round is None or base.order > coordination.round.order)
    if not (happened or is_newer):
        return replace(coordination, job=job)
    changes = NodeChanges(job, coordination.round, now)
    if base is not None and is_newer:
        changes.adopt_round(base)
        coordination = replace(coordination, round=base, proposed=None, halt=None, short_since=None)
        ended = coordination.ended
        # Those that have ended had seats in that round, and are gone.
        closed = [Closed(name, ENDED) for name, state in ended.items() if not state.leaving]
        happened = [*ended.values(), *closed, *coordination.here.values(), *happened]
    for event in happened:
        if isinstance(event, NodeState):
            changes.read_state(event)
            continue
        changes.forget_refusal(event.node)
        if event.how == BROKEN:
            changes.put_away(event.node)
        elif event.how == SILENT:
            changes.drop(event.node, IS_SILENT, event.detail)
        else:
            changes.drop(event.node, DIED, describe_death(event.detail))
    if coordination.round is not None and coordination.round.coordinator in coordination.knowledge.dead:
        changes.give_up(coordination.round)
    return replace(coordination, job=changes.close())


def _raise_term(coordination: Coordination, now: float) -> Coordination:
    """Take a higher term than each that a node here has promised to follow."""
    highest = max((state.promise.rank for state in coordination.here.values()), default=(0, ""))
    if highest <= coordination.promise.rank:
        return coordination
    if coordination.choice == LEASE and now >= coordination.lease_until:
        return replace(coordination, is_over=True)  # another node has the lease
    return _take_term(coordination, highest[0] + 1)


def _take_term(coordination: Coordination, term: int) -> Coordination:
    """Go on in a higher term. The round runs on: nobody can have formed another one without its members."""
    promise = Promise(term, coordination.promise.coordinator)
    job = replace(coordination.job, term=term)
    return replace(coordination, promise=promise, job=job, proposed=None, ended=MappingProxyType({}))


# --- orders ----------------------------------------------------------------------------------------------------------
def make_order(coordination: Coordination, name: str) -> Order:  # noqa: PLR0911 - one for each kind of order
    """Return what a node that is connected shall do now."""
    promise, job = coordination.promise, coordination.job
    memory = None if coordination.choice == ONLY_ONE else coordination.memory
    refusal = next((one for one in job.refusals if one.node == name), None)
    if refusal is not None:
        return Order(promise, REFUSE, reason=refusal.verdict, detail=refusal.detail)
    if coordination.end is not None:
        return Order(promise, END, end=coordination.end)
    if coordination.is_over:
        # Where nobody can go on with the round, its workers stop; another coordinator goes on with it.
        reason = "" if coordination.short_since is None or coordination.successor else "replaced"
        return Order(promise, SEARCH, reason=reason, to=coordination.successor)
    proposed, node = coordination.proposed, job.nodes.get(name)
    if proposed is not None and name in proposed.proposals:
        return Order(
            promise,
            PROPOSE,
            assignment=proposed.assignments[name],
            proposal=proposed.proposals[name],
            memory=memory,
        )
    if node is not None and node.is_member and job.phase in _ACTIVE:
        phase = {RUNNING: START, WARNED: WARN, HALTING: HALT}[job.phase]
        reason, detail = ("", "") if coordination.halt is None else (coordination.halt.reason, coordination.halt.detail)
        # The node has its place from the proposal, so this order is the same for all members.
        return Order(promise, phase, coordination.round, reason=reason, detail=detail, memory=memory)
    if name in coordination.here and coordination.here[name].phase != IDLE:
        return Order(promise, HALT, reason="replaced", memory=memory)
    return Order(promise, GATHER, memory=memory)


def next_at(coordination: Coordination, now: float) -> float | None:
    """Return when time alone may bring the next decision after `decide` at this time; None where only an event can."""
    job, config = coordination.job, coordination.job.config
    if config is None or job.phase == JOB_ENDED or coordination.is_over:
        return None
    times = [since + config.lease for since in coordination.away.values()]
    times += [awaited_until(job, config)] if job.is_awaiting else []
    times += [counts_at(node, config) for node, _ in find_disputes(job)]
    if job.phase == GATHERING:
        times += [job.waits_since + config.join_timeout]
        ends = formation.last_call_ends(job, config)
        times += [] if ends is None or coordination.round is not None else [ends]
        if coordination.short_since is not None:
            times += [coordination.short_since + PATIENCE * config.lease]
    elif job.until is not None:
        times += [job.until]
    elif job.phase == RUNNING:
        times += [scale_up_at(job, config)]
    return min((time for time in times if now < time < math.inf), default=None)


# --- memory ----------------------------------------------------------------------------------------------------------
def _edition(memory: JobMemory) -> tuple[int, int]:
    return memory.term, memory.edition


def _keep_memory(coordination: Coordination, now: float) -> Coordination:
    """Write the memory anew when something in it has changed, so that the next coordinator has it."""
    if coordination.choice == ONLY_ONE or coordination.round is None:
        return coordination
    job, memory = coordination.job, coordination.memory
    settled = job.round_id if job.phase in (GATHERING, PAUSING) else ("" if memory is None else memory.settled_round)
    facts = (
        coordination.round,
        settled,
        job.term,
        job.restart_count,
        job.changes,
        job.attempts,
        job.scripts,
        job.incidents,
        job.exclusions,
    )
    if facts == coordination.memory_facts:
        return coordination
    edition = memory.edition + 1 if memory is not None and memory.term == job.term else 0
    memory = write_memory(job, coordination.round, edition=edition, settled_round=settled, now=now)
    return replace(coordination, memory=memory, memory_facts=facts)
