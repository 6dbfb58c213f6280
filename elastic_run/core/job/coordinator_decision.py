"""What the coordinator decides next: what the job's policy says, or what a log that tells of no round needs.

In a log that tells of no round yet nothing is decided before it is known what the nodes know (`view_change`).
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job import machine as coordination
from elastic_run.core.job.apply_facts import Silent, apply_facts
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.majority import describe_majority
from elastic_run.core.job.reported_failure import verdict_exit_code
from elastic_run.core.job.state import ENDED, GATHERING, HALTING, RUNNING, WARNED
from elastic_run.core.job.view_change import (
    find_ahead,
    find_view,
    is_outdated,
    keep_facts,
    leave_out_old,
    may_go_on,
    restate,
)
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.job_keys import COPIES, copy_key
from elastic_run.core.protocol.messages import LOSS, End, Halt, Join, Recovered, Resync, SeatDead
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.coordinator_state import Coordinator
    from elastic_run.core.job.machine import Job
    from elastic_run.core.job.view_change import View
    from elastic_run.core.protocol.messages import Copy

#: Leases for which nodes that know of a round may come before a job is founded in a successor's store, or before the
#: nodes that wait for a majority are told to stop their workers: each may have noticed the loss a lease late.
WAIT_LIMIT = 2
_OUTDATED = "a round may have been formed in another store, and no node here has its state"


def decide_next(coordinator: Coordinator, events: Sequence[Event], now: float, jitter: float) -> Coordinator:
    """Apply events, or the time that has passed; the decision that follows is `pending` then."""
    if coordinator.job.round == 0:
        folded = _watch(coordinator, apply_facts(coordinator.job, events, now), now)
        heard = {event.node: event.sequence for event in folded.events if not isinstance(event, SeatDead | Silent)}
        events = leave_out_old(events, heard)
        copies = _forget_missing(folded.copies, events)
        coordinator = replace(folded, events=(*folded.events, *events), copies=copies, due=None, view=None)
        view = find_view(coordinator.events, coordinator.copies)
        if view is not None:
            return _recover(coordinator, view, now)
        founds_at = _after_leases(coordinator, coordinator.wait_limit)
        if now < founds_at:
            return replace(coordinator, due=founds_at, pending=coordinator.last)
        events = ()
    elif ahead := find_ahead(coordinator.job, coordinator.term, events):
        unwatched = replace(coordinator, leases=liveness.watch(coordinator.leases, {}, now))
        return ask_anew(unwatched, events, ahead, now)
    late = [copy_key(event.copy) for event in events if isinstance(event, Join) and event.copy]
    garbage_keys = dict.fromkeys([*coordinator.former_garbage_keys, *late])
    coordinator = replace(coordinator, former_garbage_keys=tuple(garbage_keys))
    step = coordination.decide(coordinator.job, events, now=now, jitter=jitter)
    return replace(_watch(coordinator, step.job, now), pending=step.decision or coordinator.last)


def ask_anew(coordinator: Coordinator, events: Sequence[Event], ahead: Collection[str], now: float) -> Coordinator:
    """Ask all nodes where they stand: the job went on in another store, and this log is older than what they know."""
    former = coordinator.job
    kept = keep_facts(former, events, ahead)
    begun = replace(
        coordination.begin(),
        term=former.term,
        slot=former.slot,
        coordinator=former.coordinator,
        store_id=former.store_id,
        highest_round=former.highest_round,
        restart_count=former.restart_count,
        incarnation=f"{coordinator.node}.{coordinator.term}",
    )
    return replace(
        coordinator,
        job=begun,
        began=now,
        wait_limit=1,
        first=coordinator.position,
        events=kept,
        kept=kept,
        former=former,
        # The first nodes to answer may know of older rounds only; the log never goes on from one of those.
        copies=MappingProxyType({former.copy: former}),
        former_garbage_keys=tuple(key for key in coordinator.former_garbage_keys if not key.startswith(COPIES)),
        has_halted=False,
        pending=Resync(coordinator.term, coordinator.node, "the job went on in another store"),
    )


def _forget_missing(copies: Mapping[Copy, Job | None], events: Sequence[Event]) -> Mapping[Copy, Job | None]:
    """Return the copies that were read, without those that were missing and a node may have put there since then."""
    told = {event.copy for event in events if isinstance(event, Join)}
    return MappingProxyType({copy: job for copy, job in copies.items() if job is not None or copy not in told})


def _watch(coordinator: Coordinator, job: Job, now: float) -> Coordinator:
    leases, config = coordinator.leases, job.config
    if config is not None:
        is_founding = job.round == 0 and coordinator.view is None
        leases = replace(leases, lease=config.lease)
        leases = liveness.expect_first(leases, config.first_leases if is_founding else 1, now)
    return replace(coordinator, job=job, leases=liveness.watch(leases, job.nodes, now))


def _after_leases(coordinator: Coordinator, count: int) -> float:
    config = coordinator.job.config
    return coordinator.began + (0.0 if config is None else count * config.lease)


def _recover(coordinator: Coordinator, view: View, now: float) -> Coordinator:
    """Go on from what the nodes know of their job, as soon as a majority of its last round is here."""
    wanted = next((copy for copy in view.copies if copy not in coordinator.copies), None)
    if wanted is not None:
        return replace(coordinator, wants=wanted)
    job = restate(view, coordinator.copies, coordinator.events, begun=coordinator.job, now=now)
    config, waited = job.config or JobConfig(1, 1), now - coordinator.began
    if may_go_on(view, job, config, waited):
        term = max(coordinator.term, view.highest_term + 1)
        # Not all members may have read that the round was warned or halted: it is said again in this log.
        # The cause of a failure is awaited anew, once the node that failed is here. A backup may have the job's end,
        # while nodes have gone on from an older backup: the job runs again, and may end in the same way.
        if job.phase in (RUNNING, WARNED, HALTING, ENDED):
            job = replace(job, phase=RUNNING, until=None)
        job = replace(job, term=term, since=coordinator.began)
        recovered = Recovered(term, coordinator.node, job.round, job.round_id, job.restart_count, job.incarnation)
        return replace(_watch(coordinator, job, now), pending=recovered)
    missing = _OUTDATED if is_outdated(view, job) else describe_majority(job, config)
    gathering = replace(job, phase=GATHERING, since=coordinator.began)
    return _await_majority(coordinator, gathering, config, waited, missing)


def _await_majority(coordinator: Coordinator, view: Job, config: JobConfig, waited: float, missing: str) -> Coordinator:
    """Wait for a majority: its workers run on for two leases, then those here are told to stop theirs."""
    coordinator = replace(coordinator, view=view, pending=coordinator.last)
    halts_after = WAIT_LIMIT * config.lease
    if not config.has_successors:
        return replace(coordinator, due=coordinator.began + config.lease)
    if waited >= config.join_timeout:
        detail = f"{missing} within {config.join_timeout:g} s"
        verdict = "nodes_lost"
        return replace(coordinator, pending=End(coordinator.term, verdict, verdict_exit_code(verdict), detail))
    if waited >= halts_after and not coordinator.has_halted:
        halt = Halt(coordinator.term, view.round, LOSS, missing)
        return replace(coordinator, pending=halt, has_halted=True)
    due = config.join_timeout if coordinator.has_halted else min(halts_after, config.join_timeout)
    return replace(coordinator, due=coordinator.began + due)
