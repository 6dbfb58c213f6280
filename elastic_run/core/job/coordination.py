"""The coordinator of a job: what the nodes are goes in, what each node shall do comes out. Pure.

`decide(job, events, now=, jitter=)` takes in what has happened, and `make_order(job, node)` says what a node shall do
after it. The driver sends each node its order when it differs from the order that the node was sent last.

- gather -> propose -> start -> (warn) -> halt -> every member has ended -> settle: restart, change of members, or end.
- A proposal starts when all its members have accepted it. It is abandoned when one of them is away; the next one has a
  higher number. The round has started when the first `start` is sent, whatever arrives.
- A coordinator that takes over adopts the newest round that has surely started (`founding`), and waits two leases for
  its members. If all of them come, the round runs on.
- A coordinator whose lease was not renewed in time starts nothing, and the round that runs goes on. It starts what all
  have accepted when the lease is renewed, and steps down when another node holds it.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.core.config import JobConfig
from elastic_run.core.job import documents
from elastic_run.core.job.codec import encode, to_message
from elastic_run.core.job.documents import IDLE, JobMemory, NodeState, Order, Promise
from elastic_run.core.job.founding import LEASE, ONLY_ONE, describe_majority, find_base, list_dead
from elastic_run.core.job.node_changes import NodeChanges, describe_misfit
from elastic_run.core.job.node_status import WaitStatus
from elastic_run.core.job.ranks import counts_at, describe_missing_ranks, find_disputes
from elastic_run.core.job.restart_policy import UNHEALTHY
from elastic_run.core.job.round_ending import (
    awaited_until,
    describe_lost,
    describe_refused,
    list_present,
    scale_up_at,
)
from elastic_run.core.job.round_forming import PATIENCE, advance, last_call_ends
from elastic_run.core.job.state import (
    ACTIVE,
    BROKEN,
    ENDED,
    GATHERING,
    HALTING,
    OVER,
    PAUSING,
    REMEMBERED,
    RUNNING,
    SILENT,
    WARNED,
    Closed,
    Job,
    LeaseRenewed,
    MayFound,
    Said,
    StepDown,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from elastic_run.core.job.documents import Round
    from elastic_run.core.job.state import Event

#: Nodes that `list_left_out` names.
_MOST_LEFT_OUT = 32
#: Bytes of a memory as JSON: each node gets it with each order.
LARGEST_MEMORY = 16 * 1024
#: What is in it: another memory is written when one of these changes.
_MEMORY_FIELDS = ("restart_count", "changes", "attempts", "scripts", "incidents", "exclusions")


# --- what has happened -----------------------------------------------------------------------------------------------
def decide(job: Job, events: Iterable[Event], *, now: float, jitter: float = 0.0) -> Job:
    """Take in documents and ends of connections, in order, and decide; without events, decide for the time alone.

    `jitter` is a random number in [0, 1), for the pause before a restart.
    """
    if job.is_over:
        return job
    events = list(events)
    before: Job | None = None
    after = job
    for event in events:
        if isinstance(event, StepDown):
            after = replace(after, is_over=True, successor=event.to)
        elif isinstance(event, MayFound):
            after = replace(after, may_found=True)
        elif isinstance(event, LeaseRenewed):
            # A store that has lost its data counts from the beginning again: that is no other term.
            after = replace(after, lease_until=event.until)
            after = after if event.term <= after.promise.term else _take_term(after, event.term)
    after = _raise_term(_take_in(after, events, now), now)
    while after != before and not after.is_over:
        before, after = after, advance(after, now, jitter)
    return _keep_memory(job, after, now)


def _take_in(job: Job, events: Sequence[Event], now: float) -> Job:
    here, ended, away = dict(job.here), dict(job.ended), dict(job.away)
    happened: list[NodeState | Closed] = []
    config = job.config
    for event in events:
        if isinstance(event, Said):
            config = config or event.state.config
            state, memory = event.state, event.state.memory
            state = state if memory is None else replace(state, memory=None)
            if describe_misfit(state, config, job.scripts):
                # This node will be refused: its rounds and coordinators belong to another job. If they counted, this
                # job would wait for the members of that round, and end when they don't come.
                state = replace(state, promise=job.promise, started=None, accepted=(), known_round=0, dead="")
            elif memory is not None and (job.memory is None or _edition(memory) > _edition(job.memory)):
                job = take_memory(job, memory, now)
            away.pop(state.node, None)
            here.pop(state.node, None)
            # A node that leaves accepts nothing any more: it has ended in the hands of the coordinator that it follows.
            (ended if state.leaving else here)[state.node] = state
            happened.append(state)
        elif isinstance(event, Closed) and (event.node in here or event.node in away):
            last = here.pop(event.node, None)
            if last is not None and event.how == ENDED:
                ended[event.node] = last
            away.pop(event.node, None)
            if event.how == BROKEN:
                away[event.node] = now
            happened.append(event)
    lease = math.inf if job.config is None else job.config.lease
    overdue = [name for name, since in away.items() if now >= since + lease]
    happened += [Closed(name, SILENT, f"silent for {lease:.1f} s") for name in overdue]
    job = replace(
        job,
        here=MappingProxyType(here),
        # That coordinator alone counts its seat.
        ended=MappingProxyType(
            {key: one for key, one in ended.items() if not one.leaving or one.promise == job.promise}
        ),
        away=MappingProxyType({name: since for name, since in away.items() if name not in overdue}),
    )
    proposed = job.proposed
    if proposed is not None:
        # All members have promised to follow this coordinator, so no other one can have started anything on them. The
        # `start` of its own last round may be late: a node that reads it accepts nothing until it is told to stop.
        first, place = next(iter(proposed.assignments.items()))
        is_possible = all(name in job.here and job.here[name].phase == IDLE for name in proposed.proposals)
        if not is_possible or place.master != job.here[first].store_address:
            job = replace(job, proposed=None)
    return _change_nodes(job, happened, now)


def _change_nodes(job: Job, happened: Sequence[NodeState | Closed], now: float) -> Job:
    base = find_base(job)
    is_newer = base is not None and (job.round is None or base.order > job.round.order)
    if not (happened or is_newer):
        return job
    changes = NodeChanges(job, now)
    if base is not None and is_newer:
        changes.adopt_round(base)
        # Those that have ended had seats in that round, and are gone.
        closed = [Closed(name, ENDED) for name, state in job.ended.items() if not state.leaving]
        happened = [*job.ended.values(), *closed, *job.here.values(), *happened]
    for event in happened:
        if isinstance(event, NodeState):
            changes.read_state(event)
        else:
            changes.read_closed(event)
    last = base if is_newer else job.round
    if last is not None and last.coordinator in list_dead(job):
        changes.give_up(last)
    return changes.close()


def _raise_term(job: Job, now: float) -> Job:
    """Take a higher term than each that a node here has promised to follow."""
    highest = max((state.promise.rank for state in job.here.values()), default=(0, ""))
    if highest <= job.promise.rank:
        return job
    if job.choice == LEASE and now >= job.lease_until:
        return replace(job, is_over=True)  # another node has the lease
    return _take_term(job, highest[0] + 1)


def _take_term(job: Job, term: int) -> Job:
    """Go on in a higher term. The round runs on: nobody can have formed another one without its members."""
    return replace(job, promise=Promise(term, job.node), proposed=None, ended=MappingProxyType({}))


# --- orders ----------------------------------------------------------------------------------------------------------
def make_order(job: Job, name: str) -> Order:  # noqa: PLR0911 - one for each kind of order
    """Return what a node that is connected shall do now."""
    promise, proposed, node = job.promise, job.proposed, job.nodes.get(name)
    memory = None if job.choice == ONLY_ONE else job.memory
    refusal = next((one for one in job.refusals if one.node == name), None)
    if refusal is not None:
        return Order(promise, documents.REFUSE, reason=refusal.verdict, detail=refusal.detail)
    if job.end is not None:
        return Order(promise, documents.END, end=job.end)
    if job.is_over:
        # Where nobody can go on with the round, its workers stop; another coordinator goes on with it.
        reason = "" if job.short_since is None or job.successor else documents.REPLACED
        return Order(promise, documents.SEARCH, reason=reason, to=job.successor)
    if proposed is not None and name in proposed.proposals:
        place, proposal = proposed.assignments[name], proposed.proposals[name]
        return Order(promise, documents.PROPOSE, assignment=place, proposal=proposal, memory=memory)
    if node is not None and node.is_member and job.phase in ACTIVE:
        phase = {RUNNING: documents.START, WARNED: documents.WARN, HALTING: documents.HALT}[job.phase]
        reason, detail = ("", "") if job.halt is None else (job.halt.reason, job.halt.detail)
        # The node has its place from the proposal, so this order is the same for all members.
        return Order(promise, phase, job.round, reason=reason, detail=detail, memory=memory)
    if name in job.here and job.here[name].phase != IDLE:
        return Order(promise, documents.HALT, reason=documents.REPLACED, memory=memory)
    return Order(promise, documents.GATHER, memory=memory)


def next_at(job: Job, now: float) -> float | None:
    """Return when time alone may bring the next decision after `decide` at this time; None where only an event can."""
    config = job.config
    if config is None or job.phase == OVER or job.is_over:
        return None
    times = [since + config.lease for since in job.away.values()]
    times += [awaited_until(job, config)] if job.is_awaiting else []
    times += [counts_at(node, config) for node, _ in find_disputes(job)]
    if job.phase == GATHERING:
        times += [job.waits_since + config.join_timeout]
        ends = last_call_ends(job, config)
        times += [] if ends is None else [ends]
        times += [] if job.short_since is None else [job.short_since + PATIENCE * config.lease]
    elif job.until is not None:
        times += [job.until]
    elif job.phase == RUNNING:
        times += [scale_up_at(job, config)]
    return min((time for time in times if now < time < math.inf), default=None)


def describe_wait(job: Job, now: float) -> WaitStatus:
    """Return which nodes are there, and which are needed."""
    config = job.config or JobConfig(1, 1)
    is_gathering = job.phase == GATHERING
    left, ends = None, last_call_ends(job, config) if is_gathering else None
    if is_gathering:
        left = max(0.0, (job.waits_since + config.join_timeout if ends is None else ends) - now)
    return WaitStatus(
        phase=job.phase,
        round=job.number,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        present=len(job.nodes),
        hosts=list_present(job) if is_gathering else (),
        lost=(*describe_lost(job), *describe_refused(job)),
        seconds_left=left,
        missing=(describe_majority(job) or describe_missing_ranks(job, config)) if is_gathering else "",
        starts=ends is not None,
    )


def list_left_out(job: Job, now: float) -> list[dict[str, Any]]:
    """Return the nodes that the job goes on without, as docs/see-into-a-running-job.md has `left_out`."""
    window = None if job.config is None else job.config.exclude_after
    period = None if window is None else window.seconds
    found: list[dict[str, Any]] = []
    for one in job.exclusions:
        expires = None if period is None else one.at + period - now
        if expires is None or expires > 0:
            about = {"host": one.host, "kind": "excluded", "reason": one.reason}
            found.append({**about, "seconds": now - one.at, "expires": expires})
    hosts = {node.node_info.host for node in job.nodes.values()}
    for gone in job.gone.values():
        if gone.reason == UNHEALTHY and gone.was is not None and gone.was.node_info.host not in hosts:
            reason = gone.detail.removeprefix(UNHEALTHY).removeprefix(": ")
            about = {"host": gone.was.node_info.host, "kind": UNHEALTHY, "reason": reason}
            found.append({**about, "seconds": None, "expires": None})
    return found[-_MOST_LEFT_OUT:]


# --- memory ----------------------------------------------------------------------------------------------------------
def _edition(memory: JobMemory) -> tuple[int, int]:
    return memory.term, memory.edition


def _keep_memory(before: Job, job: Job, now: float) -> Job:
    """Write the memory anew when something in it has changed, so that the next coordinator has it."""
    if job.choice == ONLY_ONE or job.round is None:
        return job
    memory, is_settled = job.memory, job.phase in (GATHERING, PAUSING)
    settled = job.round.round_id if is_settled else "" if memory is None else memory.settled_round
    own = memory if memory is not None and memory.term == job.promise.term else None
    if (
        own is not None
        and (own.round, own.settled_round) == (job.round, settled)
        and all(getattr(before, name) == getattr(job, name) for name in _MEMORY_FIELDS)
    ):
        return job
    edition = 0 if own is None else own.edition + 1
    return replace(job, memory=write_memory(job, job.round, edition=edition, settled_round=settled, now=now))


def write_memory(job: Job, started: Round, *, edition: int, settled_round: str, now: float) -> JobMemory:
    """Return the memory of a job whose last round has started.

    Where it is too long, the oldest causes of attempts are left out, then incidents and failures.
    """
    memory = JobMemory(
        term=job.promise.term,
        edition=edition,
        round=started,
        settled_round=settled_round,
        restart_count=job.restart_count,
        restart_times=tuple(now - at for at in job.restart_times),
        changes=tuple(now - at for at in job.changes),
        failures=job.failures[-REMEMBERED:],
        attempts=job.attempts,
        scripts=job.scripts,
        incidents=tuple(replace(one, at=now - one.at) for one in job.incidents),
        exclusions=tuple(replace(one, at=now - one.at) for one in job.exclusions),
    )
    for name in ("attempts", "incidents", "failures"):
        while getattr(memory, name) and len(encode(to_message(memory))) > LARGEST_MEMORY:
            memory = replace(memory, **{name: getattr(memory, name)[1 + len(getattr(memory, name)) // 2 :]})
    return memory


def take_memory(job: Job, memory: JobMemory, now: float) -> Job:
    """Return the state of a job that goes on with the memory of an earlier coordinator."""
    written_at = now - memory.age
    return replace(
        job,
        memory=memory,
        restart_count=max(job.restart_count, memory.restart_count),
        restart_times=tuple(written_at - age for age in memory.restart_times),
        changes=tuple(written_at - age for age in memory.changes),
        failures=memory.failures,
        attempts=memory.attempts,
        scripts=memory.scripts,
        incidents=tuple(replace(one, at=written_at - one.at) for one in memory.incidents),
        exclusions=tuple(replace(one, at=written_at - one.at) for one in memory.exclusions),
    )
