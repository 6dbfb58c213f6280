"""What the policy of a job says of a round that runs or has ended, of nodes that wait, and of disputed ranks. Pure.

- A round that loses a worker or a node is halted. What follows is settled when it has stopped on every node that is
  still there (`round_outcome`), because only then the cause is known.
- If all workers that failed look as if they had lost a peer, and other workers still run, the halt is delayed by
  `CAUSE_WAIT`: one of the running workers may have the root cause and be cleaning up. A halt would stop it before it
  reports the cause. A lost node ends the delay.
- A node that comes to a running round waits `scale_up_delay` for others, then the round makes way; not when one of its
  members is done already, not when it is full, and no more often than the configuration allows.
- All members done, and nobody warned or halted: success. A member that goes after it was done changes nothing.
"""

from __future__ import annotations

import math

from elastic_run.core.job.host_lists import list_hosts
from elastic_run.core.job.node_changes import NodeChanges
from elastic_run.core.job.ranks import counts_at, describe_dispute, describe_missing_ranks, find_disputes
from elastic_run.core.job.restart_policy import CAUSE_WAIT
from elastic_run.core.job.round_outcome import (
    change_allowed_at,
    describe_lost,
    describe_refused,
    settle,
    verdict_exit_code,
)
from elastic_run.core.job.state import ENDED, HALTING, RUNNING, WARNED, Job, Node
from elastic_run.core.protocol.facts import FAILURE, JOIN, LEAVE, LOSS, End, Halt
from elastic_run.core.protocol.outcomes import ANNOUNCED, DONE, FAILED, STOPPED, UNREACHABLE
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.state import Job, Node

#: Names that a line for the user holds.
SHOWN = 8
#: Leases for which the members of a round are awaited after a change of the coordinator, where there are others: each
#: node may notice the loss of the former one a lease late.
_CHANGE_LEASES = 2
_TROUBLES = frozenset((FAILED, UNREACHABLE, STOPPED))


@dataclass(frozen=True, slots=True)
class Step:
    """What follows: the state, and the halt or the end of the job that goes with it."""

    job: Job
    decision: Halt | End | None = None


def awaited_until(job: Job, config: JobConfig) -> float:
    """Return when the job gives up members that have not come after a change of the coordinator."""
    return job.since + (_CHANGE_LEASES if config.has_successors else 1) * config.lease


def settle_ranks(job: Job, config: JobConfig, now: float) -> Step:
    """Refuse a node whose fixed rank another node has; before the first round either of them may be right."""
    disputes = find_disputes(job)
    job = replace(job, rank_claims=tuple(node.node for node, _ in disputes))
    due = [(node, rival) for node, rival in disputes if now >= counts_at(node, config)]
    if not due:
        return Step(job)
    node, rival = due[0]
    detail = describe_dispute(node, rival)
    if job.round == 0:
        end = End(job.term, "refused", verdict_exit_code("refused"), detail, None, job.attempts)
        return Step(replace(job, phase=ENDED, rank_claims=()), end)
    changes = NodeChanges(job, None, now)
    changes.refuse(node.node, detail, detail)
    return Step(changes.close())


def watch_round(job: Job, config: JobConfig, now: float) -> Step:
    """Decide about a round of which something still runs, and should."""
    failing = [node for node in job.members if node.failing is not None or node.outcome in _TROUBLES]
    is_certain = not all(node.is_suspecting for node in failing)
    if failing and not is_certain and not job.has_lost:
        until = now + CAUSE_WAIT
        until = until if job.until is None else min(job.until, until)
        if now < until:
            return Step(replace(job, until=until))
    if failing and (is_certain or not job.has_lost):
        first = min(failing, key=lambda node: (node.is_suspecting, node.failing is None, node.failing or 0))
        reason = FAILURE if any(node.outcome != STOPPED for node in failing) else LEAVE
        return _halt(job, reason, _describe_trouble(first))
    if job.has_lost:
        return _halt(job, _loss_reason(job), _losses(job))
    if job.phase == WARNED:
        is_over = job.until is None or now >= job.until
        return _halt(job, JOIN, _newcomers(job)) if is_over else Step(job)
    return _make_way(job, config, now) if now >= scale_up_at(job, config) else Step(job)


def _describe_trouble(node: Node) -> str:
    if node.outcome == STOPPED:
        return f"{node.node_info.host} has stopped"
    if node.outcome == UNREACHABLE:
        return f"{node.node_info.host} can't reach rank 0's store"
    return f"a worker failed on {node.node_info.host}"


def _loss_reason(job: Job) -> str:
    lost = [gone for gone in job.gone_members if gone.was is not None and gone.was.outcome != DONE]
    return LEAVE if lost and all(gone.reason in ANNOUNCED for gone in lost) else LOSS


def conclude(job: Job, config: JobConfig, now: float, jitter: float) -> Step:
    """Decide what follows a round of which nothing runs any more."""
    if job.phase != HALTING and job.has_lost:
        # A node that is lost may live, and come back: it is told then that the round is over.
        return _halt(job, _loss_reason(job), _losses(job))
    is_done = all(member.outcome == DONE for member in job.members)
    if job.phase == RUNNING and is_done:
        return end_job(job, End(job.term, "success", 0, _describe_leavers(job), None, job.attempts, len(job.seats)))
    settled = settle(job, config, now=now, jitter=jitter)
    return Step(settled.job) if settled.end is None else end_job(settled.job, settled.end)


def _make_way(job: Job, config: JobConfig, now: float) -> Step:
    if config.scale_up_grace <= 0:
        return _halt(job, JOIN, _newcomers(job))
    return Step(replace(job, phase=WARNED, since=now, until=now + config.scale_up_grace))


def scale_up_at(job: Job, config: JobConfig) -> float:
    """Return when a running round ends for the nodes that wait; infinity for never."""
    members = job.members
    is_full = len(members) >= config.max_nodes
    if is_full or job.is_awaiting or not job.waiting or any(member.outcome for member in members):
        return math.inf
    return max(min(node.arrived_at for node in job.waiting) + config.scale_up_delay, change_allowed_at(job, config))


def _halt(job: Job, reason: str, detail: str) -> Step:
    return Step(replace(job, phase=HALTING, until=None), Halt(job.term, job.round, reason, detail))


def end_job(job: Job, end: End) -> Step:
    """Return the end of the job as a step."""
    return Step(replace(job, phase=ENDED), end)


def give_up_waiting(job: Job, config: JobConfig, missing: str, *, has_lease: bool) -> End:
    """Return the end of a job for which not enough nodes have come.

    Args:
        job: The state.
        config: Its configuration.
        missing: Which nodes of an earlier round are needed, a clause; "" if none are.
        has_lease: Whether the coordinator may form rounds: its lease is renewed, or it needs none.
    """
    count, waited = len(job.waiting), f"{config.join_timeout:g} s"
    if count >= config.min_nodes and not has_lease:
        detail = f"the lease could not be renewed within {waited}, so no round could form"
        return End(job.term, "store_lost", verdict_exit_code("store_lost"), detail, None, job.attempts)
    verdict = "rendezvous" if job.round == 0 else "nodes_lost"
    needed = f"the job needs at least {config.min_nodes} {'nodes' if config.min_nodes > 1 else 'node'}"
    if missing and count >= config.min_nodes:
        detail = f"{missing} within {waited}"
    elif job.round == 0:
        detail = f"{needed}, but only {count} came within {waited}: {', '.join(list_present(job))}"
    else:
        detail = f"{needed}, but has only {count} left, and no replacement came within {waited}"
    ranks = describe_missing_ranks(job, config)
    lost, refused = describe_lost(job, SHOWN), describe_refused(job, SHOWN)
    clauses = [detail, ranks]
    clauses += [f"lost: {', '.join(lost)}"] if lost else []
    clauses += [f"not in the job: {', '.join(refused)}"] if refused else []
    return End(job.term, verdict, verdict_exit_code(verdict), "; ".join(filter(None, clauses)), None, job.attempts)


def _describe_leavers(job: Job) -> str:
    left = describe_lost(job, SHOWN)
    return f"lost after their workers had ended with success: {', '.join(left)}" if left else ""


def _losses(job: Job) -> str:
    # The names of the members that have not come after a change of the coordinator are unknown.
    return ", ".join(describe_lost(job, SHOWN)) or "not all nodes of the round have reported again"


def _newcomers(job: Job) -> str:
    return ", ".join(list_hosts([node.node_info.host for node in job.waiting]))


def list_present(job: Job) -> tuple[str, ...]:
    """Return the host names of the nodes that are there, or ranges of them."""
    return list_hosts([node.node_info.host for node in job.nodes.values()])
