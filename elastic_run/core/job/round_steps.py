"""From one round of a job to the next: gather, propose, start, and what follows its end. Pure.

- A round forms at once when the maximum of nodes is there, or every surviving member of the last round. Only a first
  round of fewer nodes waits for the last call.
- `succession` says whether the nodes that are here may be a round. Without that, nobody may say so for two leases, and
  then the nodes look for another coordinator.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job import formation
from elastic_run.core.job.coordination_state import Coordination, Proposed
from elastic_run.core.job.documents import Proposal, Round, shorten
from elastic_run.core.job.node_changes import NodeChanges
from elastic_run.core.job.round_outcome import clear_round, end_with
from elastic_run.core.job.round_policy import (
    awaited_until,
    conclude,
    end_job,
    give_up_waiting,
    settle_ranks,
    watch_round,
)
from elastic_run.core.job.state import ENDED as JOB_ENDED
from elastic_run.core.job.state import GATHERING, HALTING, PAUSING
from elastic_run.core.job.succession import MAJORITY, find_base, list_needed, may_form
from elastic_run.core.job.wait_status import describe_missing_seats
from elastic_run.core.protocol.facts import End, Halt
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.job.config import JobConfig

#: Leases without more than half of the seats after which the nodes look for another coordinator.
PATIENCE = 2


def advance(  # noqa: C901, PLR0911 - one branch for each phase
    coordination: Coordination, now: float, jitter: float
) -> Coordination:
    """Decide what follows, by one step; return the same state if nothing does."""
    job, config = coordination.job, coordination.job.config
    if config is None or job.phase == JOB_ENDED:
        return coordination
    if job.rank_claims:
        step = settle_ranks(job, config, now)
        job, coordination = step.job, replace(coordination, job=step.job)
        if isinstance(step.decision, End):
            return replace(coordination, end=step.decision)
    if job.is_awaiting and (now >= awaited_until(job, config) or _awaits_silent_alone(coordination, config)):
        changes = NodeChanges(job, coordination.round, now)
        changes.give_up_awaited()
        job = changes.close()
        coordination = replace(coordination, job=job)
    if job.phase == GATHERING:
        return _gather(coordination, config, now)
    if job.phase == PAUSING:
        is_over = job.until is None or now >= job.until
        return (
            replace(coordination, job=replace(job, phase=GATHERING, since=now, until=None)) if is_over else coordination
        )
    if job.ending is not None:
        step = end_job(job, end_with(job, job.ending, job.ending.verdict, job.ending.detail))
    elif any(not member.outcome for member in job.members) or job.is_awaiting:
        if job.phase == HALTING:
            return coordination
        step = watch_round(job, config, now)
    elif job.phase == HALTING and coordination.memory is not None and coordination.memory.settled_round == job.round_id:
        # The coordinator before this one has settled the round, and has told so: its failure counts once.
        return replace(coordination, job=clear_round(job, GATHERING, now))
    else:
        step = conclude(job, config, now, jitter)
    after = replace(coordination, job=step.job)
    if isinstance(step.decision, Halt):
        return replace(after, halt=step.decision)
    return replace(after, end=step.decision) if isinstance(step.decision, End) else after


def _awaits_silent_alone(coordination: Coordination, config: JobConfig) -> bool:
    """Whether only a coordinator is missing that was silent for a lease already, and the others may go on."""
    base, seats = coordination.round, coordination.job.seats
    if base is None or base.coordinator != coordination.silent or base.coordinator in coordination.here:
        return False
    awaited = [rank for rank, seat in enumerate(seats) if seat.is_awaited]
    return awaited == [base.coordinator_rank] and _has_majority(coordination, config, tuple(coordination.here))


def _gather(coordination: Coordination, config: JobConfig, now: float) -> Coordination:
    proposed = coordination.proposed
    if proposed is not None:
        is_accepted = all(
            coordination.here[name].promise == coordination.promise
            and coordination.here[name].has_accepted(proposed.round)
            for name in proposed.members
        )
        # After the lease another node may hold it, and start a round.
        if is_accepted and now < coordination.lease_until:
            return _start(coordination, proposed, now)
        if now < coordination.job.waits_since + config.join_timeout:
            return coordination
    job = formation.note_minimum(coordination.job, config, now)
    coordination = replace(coordination, job=job)
    chosen = _choose(coordination, config) if _is_formable(coordination, config, now) else ()
    if chosen and proposed is None and _may_propose(coordination, config, chosen):
        return _propose(replace(coordination, short_since=None), chosen)
    if now >= job.waits_since + config.join_timeout:
        end = give_up_waiting(
            job, config, describe_missing_seats(coordination), has_lease=now < coordination.lease_until
        )
        return replace(coordination, job=replace(job, phase=JOB_ENDED), end=end)
    if coordination.choice == MAJORITY and _lacks_majority(coordination, config):
        short_since = now if coordination.short_since is None else coordination.short_since
        is_over = now >= short_since + PATIENCE * config.lease
        return replace(coordination, short_since=short_since, is_over=is_over)
    return replace(coordination, short_since=None)


def _is_formable(coordination: Coordination, config: JobConfig, now: float) -> bool:
    """Whether enough nodes wait, nobody may come who was a member before, and the last call is over."""
    job = coordination.job
    count = len(job.waiting)
    if count < config.min_nodes or job.is_awaiting or (job.rank_claims and job.round == 0):
        return False
    if coordination.round is not None or count >= config.max_nodes:
        return True
    ends = formation.last_call_ends(job, config)
    return ends is not None and now >= ends


def _choose(coordination: Coordination, config: JobConfig) -> tuple[str, ...]:
    """Choose the nodes of the next round, in order of joining: those first whose seats are needed, then survivors."""
    needed = list_needed(coordination.knowledge) if coordination.choice == MAJORITY else ()
    here = coordination.here
    seats = {name: sum(state.has_seat(one) for one in needed) for name, state in here.items()}
    waiting = sorted(coordination.job.waiting, key=lambda one: (-seats[one.node], one.rank is None, one.arrived))
    return tuple(one.node for one in sorted(waiting[: config.max_nodes], key=lambda one: one.arrived))


def _may_propose(coordination: Coordination, config: JobConfig, chosen: Sequence[str]) -> bool:
    """Whether the chosen nodes may be the next round."""
    if any(state.promise != coordination.promise for state in coordination.here.values()):
        return False  # what a node that has not promised yet may still accept elsewhere is unknown
    if coordination.round is None and not coordination.may_found:
        return False
    return _has_majority(coordination, config, chosen)


def _has_majority(coordination: Coordination, config: JobConfig, members: Sequence[str]) -> bool:
    if coordination.choice != MAJORITY:
        return True
    return may_form(coordination.knowledge, set(members), continues_alone=config.on_split == "continue")


def _lacks_majority(coordination: Coordination, config: JobConfig) -> bool:
    is_founding = coordination.round is None and not coordination.may_found
    return not is_founding and not _has_majority(coordination, config, tuple(coordination.here))


def _propose(coordination: Coordination, chosen: Sequence[str]) -> Coordination:
    job, me = coordination.job, coordination.promise.coordinator
    number = max(job.round, job.highest_round, coordination.number) + 1
    # A first round that may have started is named as if it had: nodes that know of this proposal alone would else go on
    # without it.
    parent = find_base(coordination.knowledge) or next(reversed(list_needed(coordination.knowledge)), None)
    term = coordination.promise.term
    root = f"{term}/{number}/{me}" if parent is None else parent.root
    ranks = formation.choose_ranks(job, chosen)
    one = Round(term, number, me, root, len(chosen), ranks.get(me, -1), job.restart_count)
    # Only another coordinator that counts seats has to know the members.
    members = tuple(sorted(map(shorten, chosen))) if coordination.choice == MAJORITY else ()
    assignments = formation.assign(job, one, ranks)
    proposals = {name: Proposal(one, rank, parent, members) for name, rank in ranks.items()}
    proposed = Proposed(one, tuple(chosen), MappingProxyType(proposals), MappingProxyType(assignments))
    return replace(coordination, proposed=proposed, number=number)


def _start(coordination: Coordination, proposed: Proposed, now: float) -> Coordination:
    return replace(
        coordination,
        job=formation.form(coordination.job, proposed.round, proposed.assignments, now),
        round=proposed.round,
        proposed=None,
        started_by=(*coordination.started_by[-15:], proposed.round),
        halt=None,
    )
