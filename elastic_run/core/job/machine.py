"""The policy of a whole job, as its coordinator applies it: facts and time in, one decision after another out.

Pure (law 3): `decide(job, events, now=, jitter=) -> Step(job, decision)`. At most one decision a step, because a
decision is written to the log together with the state after it: a successor goes on from exactly there. After a
decision was written, decide again with no events: another may follow from the state alone.

Rules
- Gathering: nobody runs. The first round forms when max nodes are there, or min and the last call is over; every later
  one at once, when min are there (and, where the store can move, more than half of the last round's members). Where
  the store can move, and the nodes or the term are others than the last round's, a `Prepare` comes first: the round
  forms when more than half of the last one have confirmed it.
- A round that loses a worker or a node is halted; what follows is settled when it has stopped on every node that is
  still there (`round_outcome`), because only then the cause is known.
- Where all that failed look as if they had lost a peer, and somebody still runs, the cause is awaited for a moment: who
  has it may be cleaning up, and would be told to stop before it says what was wrong. A lost node ends that wait.
- A node that comes to a running round waits `scale_up_delay` for others, then the round makes way; not when one of its
  members is done already, not when it is full, and no more often than the configuration allows.
- All members done, and nobody warned or halted: success. A member that goes after it was done changes nothing.
- `TRANSITIONS` is the whole machine. A step that isn't in it raises.
"""

from __future__ import annotations

import math

from elastic_run.core.agent.shutdown import CAUSE_WAIT
from elastic_run.core.job import formation, majority
from elastic_run.core.job.apply_facts import Event, Silent, apply_facts, drop_refused
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.host_lists import list_hosts
from elastic_run.core.job.rank_claims import counts_at, describe_dispute, describe_missing_ranks, find_disputes
from elastic_run.core.job.refusals import describe_refused, note_refused
from elastic_run.core.job.reported_failure import verdict_exit_code
from elastic_run.core.job.round_outcome import change_allowed_at, describe_lost, end_with, settle
from elastic_run.core.job.state import (
    ENDED,
    GATHERING,
    HALTING,
    PAUSING,
    RUNNING,
    WARNED,
    Job,
    Node,
)
from elastic_run.core.job.store_change import give_up_awaited
from elastic_run.core.protocol.messages import (
    BY_SIGNAL,
    DONE,
    EXCLUDED,
    FAILED,
    FAILURE,
    JOIN,
    LEAVE,
    LOSS,
    STOPPED,
    UNHEALTHY,
    UNKILLABLE,
    UNREACHABLE,
    End,
    Form,
    Halt,
    Prepare,
    Refuse,
    Status,
    Warn,
)
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

__all__ = ["TRANSITIONS", "IllegalTransitionError", "Job", "Silent", "Step", "begin", "decide", "describe", "next_at"]

Decision: TypeAlias = Prepare | Form | Warn | Halt | Refuse | End

#: (phase, kind of the decision or None for a step without one) -> the phases that may follow.
TRANSITIONS: dict[tuple[str, type[Decision] | None], tuple[str, ...]] = {
    (GATHERING, None): (GATHERING,),
    (GATHERING, Prepare): (GATHERING,),
    (GATHERING, Form): (RUNNING,),
    (GATHERING, End): (ENDED,),
    (GATHERING, Refuse): (GATHERING,),
    (RUNNING, None): (RUNNING, GATHERING, PAUSING),
    (RUNNING, Warn): (WARNED,),
    (RUNNING, Halt): (HALTING,),
    (RUNNING, End): (ENDED,),
    (RUNNING, Refuse): (RUNNING,),
    (WARNED, None): (WARNED, GATHERING, PAUSING),
    (WARNED, Halt): (HALTING,),
    (WARNED, End): (ENDED,),
    (WARNED, Refuse): (WARNED,),
    (HALTING, None): (HALTING, GATHERING, PAUSING),
    (HALTING, End): (ENDED,),
    (HALTING, Refuse): (HALTING,),
    (PAUSING, None): (PAUSING, GATHERING),
    (PAUSING, Refuse): (PAUSING,),
}

#: Names that a line for the user holds.
_SHOWN = 8
_TROUBLES = frozenset((FAILED, UNREACHABLE, STOPPED))


class IllegalTransitionError(Exception):
    """A step that isn't in `TRANSITIONS`: a defect."""


@dataclass(frozen=True, slots=True)
class Step:
    """What follows: the state, and the decision to write with it, or None."""

    job: Job
    decision: Decision | None = None


def begin() -> Job:
    """Return the state of a job without any fact."""
    return Job()


def decide(job: Job, events: Iterable[Event], *, now: float, jitter: float = 0.0) -> Step:
    """Take in what has happened, and decide at most one thing.

    Args:
        job: The state.
        events: Facts and silences, in order; none for the time alone.
        now: Monotonic seconds.
        jitter: A random number in [0, 1), for the pause before a restart.

    Returns:
        The state after, and the decision.

    Raises:
        IllegalTransitionError: A defect.
    """
    if job.phase == ENDED:
        return Step(job)
    step = Step(apply_facts(job, events, now))
    while step.decision is None:
        before = step.job
        step = _advance(before, now, jitter)
        kind = None if step.decision is None else type(step.decision)
        if step.job.phase not in TRANSITIONS.get((before.phase, kind), ()):
            message = f"{kind.__name__ if kind else 'a step'} led from {before.phase} to {step.job.phase}"
            raise IllegalTransitionError(message)
        if step.job.phase == before.phase:
            break
    return step


def next_at(job: Job) -> float | None:
    """Return when time alone may bring the next decision.

    Args:
        job: The state, after `decide` gave no decision.

    Returns:
        Monotonic seconds, or None where only a fact or a silence can.
    """
    config = job.config
    if config is None:
        return None
    times = [_awaited_until(job, config)] if job.is_awaiting else []
    times += [counts_at(node, config) for node, _ in find_disputes(job)]
    if job.phase == GATHERING:
        times += [job.since + config.join_timeout]
        ends = formation.last_call_ends(job, config)
        times += [] if ends is None or job.is_awaiting else [ends]
    elif job.phase in (WARNED, PAUSING) and job.until is not None:
        times += [job.until]
    elif job.phase == RUNNING:
        times += [_scale_up_at(job, config) if job.until is None else job.until]
    return min((time for time in times if time < math.inf), default=None)


def describe(job: Job, now: float) -> Status:
    """Return which nodes are there, for the lines of the nodes that wait."""
    config = job.config or JobConfig(1, 1)
    left, missing, ends = None, "", None
    if job.phase == GATHERING:
        missing = majority.describe_majority(job, config) or describe_missing_ranks(job, config)
        ends = formation.last_call_ends(job, config)
        left = max(0.0, (job.since + config.join_timeout if ends is None else ends) - now)
    return Status(
        phase=job.phase,
        round=job.round,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        present=len(job.nodes),
        hosts=_hosts(job) if job.phase == GATHERING else (),
        lost=(*describe_lost(job, _SHOWN), *describe_refused(job, _SHOWN)),
        seconds_left=left,
        missing=missing,
        starts=ends is not None,
    )


def _advance(job: Job, now: float, jitter: float) -> Step:  # noqa: PLR0911 - one per phase
    if job.refusals:
        refusal = job.refusals[0]
        refuse = Refuse(job.term, refusal.node, refusal.detail, refusal.verdict)
        return Step(note_refused(replace(job, refusals=job.refusals[1:]), refusal.node), refuse)
    config = job.config
    if config is None:
        return Step(job)
    if job.rank_claims:
        job, decision = _settle_ranks(job, config, now)
        if decision is not None:
            return Step(job, decision)
    if job.is_awaiting and now >= _awaited_until(job, config):
        job = give_up_awaited(job)
    if job.phase == GATHERING:
        return _advance_gathering(job, config, now)
    if job.phase == PAUSING:
        is_over = job.until is None or now >= job.until
        return Step(replace(job, phase=GATHERING, since=now, until=None) if is_over else job)
    if job.ending is not None:
        return _end(job, end_with(job, job.ending, job.ending.verdict, job.ending.detail))
    if any(not member.outcome for member in job.members) or job.is_awaiting:
        return Step(job) if job.phase == HALTING else _watch_round(job, config, now)
    return _conclude(job, config, now, jitter)


def _awaited_until(job: Job, config: JobConfig) -> float:
    """Return when the job gives up nodes that have not come: each may notice the loss of the store a lease late."""
    return job.since + (2 if config.has_successors else 1) * config.lease


def _settle_ranks(job: Job, config: JobConfig, now: float) -> tuple[Job, Refuse | End | None]:
    """Refuse a node whose fixed rank another node has; before the first round either of them may be right."""
    disputes = find_disputes(job)
    job = replace(job, rank_claims=tuple(node.node for node, _ in disputes))
    due = [(node, rival) for node, rival in disputes if now >= counts_at(node, config)]
    if not due:
        return job, None
    node, rival = due[0]
    detail = describe_dispute(node, rival)
    if job.round == 0:
        end = End(job.term, "refused", verdict_exit_code("refused"), detail, None, job.attempts)
        return replace(job, phase=ENDED, rank_claims=()), end
    return drop_refused(job, node.node, detail), Refuse(job.term, node.node, detail)


def _advance_gathering(job: Job, config: JobConfig, now: float) -> Step:
    job = formation.note_minimum(job, config, now)
    is_disputed = bool(job.rank_claims) and job.round == 0
    if formation.is_formable(job, config, now) and not job.is_awaiting and not is_disputed:
        chosen = formation.choose(job, config)
        if not majority.needs_preparation(job, config, chosen):
            return _form(job, chosen, now)
        if not job.prepared or any(name not in job.nodes for name in job.prepared):
            return _prepare(job, chosen)
        if majority.is_prepared(job, config):
            return _form(job, job.prepared, now)
    if now >= job.since + config.join_timeout:
        return _end(job, _give_up_waiting(job, config))
    return Step(job)


def _prepare(job: Job, chosen: Sequence[str]) -> Step:
    prepare = Prepare(job.term, job.round, job.round_id, job.incarnation, job.store_id, job.known_states)
    return Step(formation.prepare(job, chosen), prepare)


def _form(job: Job, chosen: Sequence[str], now: float) -> Step:
    after = formation.form(job, chosen, now)
    world_size = sum(member.node_info.local_world_size for member in after.members)
    return Step(after, Form(job.term, after.round, after.restart_count, len(after.seats), world_size, job.incarnation))


def _watch_round(job: Job, config: JobConfig, now: float) -> Step:
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
    return _make_way(job, config, now) if now >= _scale_up_at(job, config) else Step(job)


def _describe_trouble(node: Node) -> str:
    if node.outcome == STOPPED:
        return f"{node.node_info.host} has stopped"
    if node.outcome == UNREACHABLE:
        return f"{node.node_info.host} can't reach rank 0's store"
    return f"a worker failed on {node.node_info.host}"


def _loss_reason(job: Job) -> str:
    lost = [gone for gone in job.gone_members if gone.was is not None and gone.was.outcome != DONE]
    return LEAVE if lost and all(gone.reason in (BY_SIGNAL, UNKILLABLE, UNHEALTHY, EXCLUDED) for gone in lost) else LOSS


def _conclude(job: Job, config: JobConfig, now: float, jitter: float) -> Step:
    """Decide what follows a round of which nothing runs any more."""
    if job.phase != HALTING and job.has_lost:
        # Who is lost may live, and run the round for ever if the log doesn't say that it is over.
        return _halt(job, _loss_reason(job), _losses(job))
    is_done = all(member.outcome == DONE for member in job.members)
    if job.phase == RUNNING and is_done:
        return _end(job, End(job.term, "success", 0, _describe_leavers(job), None, job.attempts, len(job.seats)))
    settled = settle(job, config, now=now, jitter=jitter)
    return Step(settled.job) if settled.end is None else _end(settled.job, settled.end)


def _make_way(job: Job, config: JobConfig, now: float) -> Step:
    if config.scale_up_grace <= 0:
        return _halt(job, JOIN, _newcomers(job))
    after = replace(job, phase=WARNED, since=now, until=now + config.scale_up_grace)
    return Step(after, Warn(job.term, job.round))


def _scale_up_at(job: Job, config: JobConfig) -> float:
    """Return when a running round ends for the nodes that wait; infinity for never."""
    members = job.members
    is_full = len(members) >= config.max_nodes
    if is_full or job.is_awaiting or not job.waiting or any(member.outcome for member in members):
        return math.inf
    return max(min(node.arrived_at for node in job.waiting) + config.scale_up_delay, change_allowed_at(job, config))


def _halt(job: Job, reason: str, detail: str) -> Step:
    return Step(replace(job, phase=HALTING, until=None), Halt(job.term, job.round, reason, detail))


def _end(job: Job, end: End) -> Step:
    return Step(replace(job, phase=ENDED), end)


def _give_up_waiting(job: Job, config: JobConfig) -> End:
    count, waited = len(job.waiting), f"{config.join_timeout:g} s"
    verdict = "rendezvous" if job.round == 0 else "nodes_lost"
    needed = f"the job needs at least {config.min_nodes} {'nodes' if config.min_nodes > 1 else 'node'}"
    if job.round == 0:
        detail = f"{needed}, but only {count} came within {waited}: {', '.join(_hosts(job))}"
    elif count >= config.min_nodes:
        detail = f"{majority.describe_majority(job, config)} within {waited}"
    else:
        detail = f"{needed}, but has only {count} left, and no replacement came within {waited}"
    missing = describe_missing_ranks(job, config)
    if missing:
        detail = f"{detail}; {missing}"
    lost = describe_lost(job, _SHOWN)
    if lost:
        detail = f"{detail}; lost: {', '.join(lost)}"
    refused = describe_refused(job, _SHOWN)
    if refused:
        detail = f"{detail}; not in the job: {', '.join(refused)}"
    return End(job.term, verdict, verdict_exit_code(verdict), detail, None, job.attempts)


def _describe_leavers(job: Job) -> str:
    left = describe_lost(job, _SHOWN)
    return f"lost after their workers had ended with success: {', '.join(left)}" if left else ""


def _losses(job: Job) -> str:
    # The names of the other nodes of a recovered round are unknown.
    return ", ".join(describe_lost(job, _SHOWN)) or "not all nodes of the round have reported again"


def _newcomers(job: Job) -> str:
    return ", ".join(list_hosts([node.node_info.host for node in job.waiting]))


def _hosts(job: Job) -> tuple[str, ...]:
    return list_hosts([node.node_info.host for node in job.nodes.values()])
