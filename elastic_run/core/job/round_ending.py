"""What a job's policy says of a round that runs or has ended, and of nodes that wait. Pure.

- A round that loses a worker or a node is halted. What follows is settled when it has stopped on every node that is
  still there, because only then the cause is known: a restart, a change of membership, or the end of the job.
- If all workers that failed look as if they had lost a peer, and other workers still run, the halt is delayed by
  `CAUSE_WAIT`: one of the running workers may have the root cause and be cleaning up. A halt would stop it before it
  reports the cause. A lost node ends the delay.
- A node that comes to a running round waits `scale_up_delay` for others, then the round makes way; not when one of its
  members is done already, not when it is full, and no more often than the configuration allows.
- All members done, and nobody warned or halted: success. A member that goes after it was done changes nothing.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.contract import EXIT_CODES, EXIT_RENDEZVOUS
from elastic_run.core.failure.root_cause import BARE_END, LOST_RANK, SECONDARY_FAILURE, EqualErrors
from elastic_run.core.job import restart_policy as outcomes
from elastic_run.core.job.codec import encode
from elastic_run.core.job.documents import FAILURE, JOIN, LEAVE, LOSS, End
from elastic_run.core.job.exclusion import exclude, judge, note_incident
from elastic_run.core.job.ranks import assign_worker_ranks, describe_missing_ranks
from elastic_run.core.job.restart_policy import CAUSE_WAIT, RULE_DECISIONS, Failure, GiveUp, decide_restart
from elastic_run.core.job.short_lists import fold_clauses, list_hosts, list_ranks
from elastic_run.core.job.state import (
    GATHERING,
    HALTING,
    OVER,
    PAUSING,
    REFUSED,
    REMEMBERED,
    RUNNING,
    WARNED,
    Gone,
    Halt,
    Job,
    Node,
    Root,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.codec import Document
    from elastic_run.core.job.documents import RoundEnd, StuckRank

#: Names that a line for the user holds.
SHOWN = 8
#: Ranks that did not stop which the end of the job names.
_MOST_STUCK = 64
#: Bytes of a report that are kept, and of one of its values where it is longer; bytes of all remembered attempts.
_REPORT_BYTES = 64 * 1024
_VALUE_BYTES = 1024
REMEMBERED_BYTES = 256 * 1024
#: Characters of a failure's signature, of the rule that decided on it, and of what a node says of it in a line.
_SIGNATURE_LENGTH = 1024
_RULE_LENGTH = 80
_SUMMARY_LENGTH = 200
#: Leases for which the members of a round are awaited after a change of the coordinator, where there are others: each
#: node may notice the loss of the former one a lease late.
_CHANGE_LEASES = 2
_TROUBLES = frozenset((outcomes.FAILED, outcomes.UNREACHABLE, outcomes.STOPPED))
_EXIT_CODES = {name: code for code, name, _ in EXIT_CODES if isinstance(code, int)}


def end_job(job: Job, verdict: str, detail: str = "", **more: Any) -> Job:
    """Return the job after its end, with the exit code that the verdict has, or 1 if it has none of its own."""
    return replace(
        job, phase=OVER, end=End(verdict, _EXIT_CODES.get(verdict, 1), detail, attempts=job.attempts, **more)
    )


def end_by_failure(job: Job, root: Root, verdict: str, detail: str) -> Job:
    """Return the job after its end by a failure whose cause is known."""
    stuck, equal_errors = _find_stuck(job, root), _count_equal_errors(job, root)
    over = end_job(job, verdict, detail, root=root.report, stuck=stuck, equal_errors=equal_errors)
    if over.end is not None and verdict in ("worker_failed", root.verdict):
        return replace(over, end=replace(over.end, exit_code=root.failure.exit_code))
    return over


# --- a round that runs -----------------------------------------------------------------------------------------------
def awaited_until(job: Job, config: JobConfig) -> float:
    """Return when the job gives up members that have not come after a change of the coordinator."""
    return job.since + (_CHANGE_LEASES if config.has_successors else 1) * config.lease


def watch_round(job: Job, config: JobConfig, now: float) -> Job:
    """Decide about a round of which something still runs, and should."""
    failing = [node for node in job.members if node.failing is not None or node.outcome in _TROUBLES]
    is_certain = not all(node.is_suspecting for node in failing)
    if failing and not is_certain and not job.has_lost:
        until = now + CAUSE_WAIT
        until = until if job.until is None else min(job.until, until)
        if now < until:
            return replace(job, until=until)
    if failing and (is_certain or not job.has_lost):
        first = min(failing, key=lambda node: (node.is_suspecting, node.failing is None, node.failing or 0))
        reason = FAILURE if any(node.outcome != outcomes.STOPPED for node in failing) else LEAVE
        return _halt(job, reason, _describe_trouble(first))
    if job.has_lost:
        return _halt_after_loss(job)
    due = scale_up_at(job, config) if job.phase == RUNNING else job.until
    if due is not None and now < due:
        return job
    if job.phase == RUNNING and config.scale_up_grace > 0:
        return replace(job, phase=WARNED, since=now, until=now + config.scale_up_grace)
    return _halt(job, JOIN, ", ".join(list_hosts([node.node_info.host for node in job.waiting])))


def scale_up_at(job: Job, config: JobConfig) -> float:
    """Return when a running round ends for the nodes that wait; infinity for never."""
    members = job.members
    is_full = len(members) >= config.max_nodes
    if is_full or job.is_awaiting or not job.waiting or any(member.outcome for member in members):
        return math.inf
    return max(min(node.arrived_at for node in job.waiting) + config.scale_up_delay, _change_allowed_at(job, config))


def _change_allowed_at(job: Job, config: JobConfig) -> float:
    """Return from when on the membership may change once more; infinity for never."""
    window = config.membership_window
    if window is None or len(job.changes) < window.count:
        return -math.inf
    if window.count == 0 or window.seconds is None:
        return math.inf
    return job.changes[-window.count] + window.seconds


def _halt(job: Job, reason: str, detail: str) -> Job:
    return replace(job, phase=HALTING, until=None, halt=Halt(reason, detail))


def _halt_after_loss(job: Job) -> Job:
    lost = [gone for gone in job.gone_members if gone.was is not None and gone.was.outcome != outcomes.DONE]
    reason = LEAVE if lost and all(gone.reason in outcomes.ANNOUNCED for gone in lost) else LOSS
    # The names of the members that have not come after a change of the coordinator are unknown.
    names = ", ".join(describe_lost(job)) or "not all nodes of the round have reported again"
    return _halt(job, reason, names)


def _describe_trouble(node: Node) -> str:
    if node.outcome == outcomes.STOPPED:
        return f"{node.node_info.host} has stopped"
    if node.outcome == outcomes.UNREACHABLE:
        return f"{node.node_info.host} can't reach rank 0's store"
    return f"a worker failed on {node.node_info.host}"


# --- what a node reports ---------------------------------------------------------------------------------------------
def read_report(node: str, end: RoundEnd, order: int) -> Root:
    """Return the failure that a node reports; values that are missing or garbage have their defaults.

    `order` is the failure's place in the order in which the failures of the round were heard.
    """
    report = end.report or {}
    decision, rule = report.get("decision"), report.get("rule")
    code, uptime, severity = report.get("exit_code"), report.get("uptime"), report.get("severity")
    signature = report.get("signature")
    own = {outcomes.UNREACHABLE: "rendezvous", outcomes.CANNOT_START: end.verdict or "cannot_start"}.get(
        end.outcome, ""
    )
    fallback = EXIT_RENDEZVOUS if end.outcome == outcomes.UNREACHABLE else _EXIT_CODES.get(own, 1)
    return Root(
        node=node,
        # Who could not reach the master's node may see no more than that it died.
        severity=LOST_RANK if end.outcome == outcomes.UNREACHABLE else severity if type(severity) is int else BARE_END,
        order=order,
        failure=Failure(
            exit_code=code if type(code) is int and code != 0 else fallback,
            signature=None if signature is None else encode({"": signature}).decode("ascii")[:_SIGNATURE_LENGTH],
            is_deterministic=report.get("is_deterministic") is True,
            uptime=float(uptime) if isinstance(uptime, int | float) else 0.0,
            decision=decision if isinstance(decision, str) and decision in RULE_DECISIONS else "",
            rule=rule[:_RULE_LENGTH] if isinstance(rule, str) else "",
        ),
        verdict=own,
        detail=end.detail,
        report=_cut(end.report),
    )


def _cut(report: Document | None) -> Document | None:
    """Return a report without its long values where it is too long to be carried to every node."""
    if report is None or len(encode(report)) <= _REPORT_BYTES:
        return report
    short = {name: value for name, value in report.items() if len(encode({name: value})) <= _VALUE_BYTES}
    return short if len(encode(short)) <= _REPORT_BYTES else {}


# --- a round that has ended ------------------------------------------------------------------------------------------
def conclude(job: Job, config: JobConfig, now: float, jitter: float) -> Job:
    """Decide what follows a round of which nothing runs any more: every member is ready or gone."""
    if job.phase != HALTING and job.has_lost:
        return _halt_after_loss(job)  # a node that is lost may live, and come back: it is told then that it is over
    if job.phase == RUNNING and all(member.outcome == outcomes.DONE for member in job.members):
        left = ", ".join(describe_lost(job))
        detail = f"lost after their workers had ended with success: {left}" if left else ""
        return end_job(job, "success", detail, nodes=len(job.seats))
    root = job.root
    if root is not None and root.severity >= SECONDARY_FAILURE and job.hidden is not None:
        root = job.hidden
    if root is None or (job.has_lost and root.severity >= SECONDARY_FAILURE):
        return _settle_change(job, config, now, is_loss=job.has_lost)
    job = note_incident(job, config, root, now)
    judgement = judge(job, config, root)
    if judgement.excludes and judgement.is_named:
        after = _settle_change(replace(job, attempts=remember(job.attempts, root.report)), config, now, is_loss=True)
    else:
        after = _settle_failure(job, config, root, now=now, jitter=jitter)
    if after.end is not None or not judgement.reason:
        return after
    if judgement.excludes:
        return exclude(after, root, judgement, now)
    host = job.nodes[root.node].node_info.host
    kept = f"{host} stays in the job although it was {judgement.reason}: {judgement.kept_because}"
    return replace(after, news="; ".join(filter(None, (after.news, kept))))


def _settle_change(job: Job, config: JobConfig, now: float, *, is_loss: bool) -> Job:
    window = config.membership_window
    if window is not None and is_loss and now < _change_allowed_at(job, config):
        per = "" if window.seconds is None else f" per {window.seconds:g} s"
        detail = f"more than {window.count} changes of membership{per}; lost: {', '.join(describe_lost(job))}"
        return end_job(job, "nodes_lost", detail, root=None if job.root is None else job.root.report)
    kept = (*job.changes, now)[-((window and window.count) or 1) :]
    return clear_round(replace(job, changes=kept, news=""), GATHERING, now)


def _settle_failure(job: Job, config: JobConfig, root: Root, *, now: float, jitter: float) -> Job:
    failures = (*job.failures, root.failure)[-REMEMBERED:]
    # Restarts that are too old to be remembered count, and are out of every window. The failure of a round counts once,
    # also where another coordinator has decided the restart after it already.
    used = max(0 if job.round is None else job.round.restart_count, job.restart_count - 1)
    answer = decide_restart(config, failures, job.restart_times, now, jitter, used=used)
    if isinstance(answer, GiveUp):
        own = root.verdict if answer.verdict == "worker_failed" else ""
        detail = "; ".join(text for text in (answer.detail or root.detail, _describe_early(job, root)) if text)
        return end_by_failure(job, root, own or answer.verdict, detail)
    kept = max(REMEMBERED, config.restart_window.count if config.restart_window else 0)
    summary = None if root.report is None else root.report.get("summary")
    job = replace(
        job,
        restart_count=used + 1,
        restart_times=(*job.restart_times, now)[-kept:],
        failures=failures,
        attempts=remember(job.attempts, root.report),
        news=summary[:_SUMMARY_LENGTH] if isinstance(summary, str) else "",
    )
    if answer.delay > 0:
        return replace(clear_round(job, PAUSING, now), until=now + answer.delay)
    return clear_round(job, GATHERING, now)


def remember(attempts: tuple[Document, ...], report: Document | None) -> tuple[Document, ...]:
    """Add the cause of an attempt, and forget the oldest where they are too many or too long."""
    kept = [*attempts, report] if report is not None else list(attempts)
    sizes = [len(encode(attempt)) for attempt in kept]
    while len(kept) > REMEMBERED or sum(sizes) > REMEMBERED_BYTES:
        del kept[0], sizes[0]
    return tuple(kept)


def clear_round(job: Job, phase: str, now: float) -> Job:
    """Leave the round behind; its survivors keep their ranks."""
    nodes = {
        name: replace(node, is_member=False, failing=None, outcome="", ends=None) if node.is_member else node
        for name, node in job.nodes.items()
    }
    gone = {
        name: replace(gone, was=replace(gone.was, is_member=False)) if gone.was is not None else gone
        for name, gone in job.gone.items()
    }
    return replace(
        job,
        phase=phase,
        nodes=MappingProxyType(nodes),
        gone=MappingProxyType(gone),
        since=now,
        until=None,
        min_reached_at=None,
    )


# --- what the end of the job tells of all nodes ----------------------------------------------------------------------
def _list_members(job: Job) -> list[Node]:
    """Return the nodes of the round, those that are gone as they were."""
    return [*job.members, *(gone.was for gone in job.gone_members if gone.was is not None)]


def _describe_early(job: Job, root: Root) -> str:
    """Name the nodes whose workers ended well, where the others knew no more than that they had lost a peer."""
    if root.severity < LOST_RANK:
        return ""
    members = sorted(_list_members(job), key=lambda node: -1 if node.rank is None else node.rank)
    places = assign_worker_ranks([(node.node_info.role, node.node_info.local_world_size) for node in members])
    done = [
        (node.node_info.host, range(place.base_rank, place.base_rank + node.node_info.local_world_size))
        for node, place in zip(members, places, strict=True)
        if node.outcome == outcomes.DONE
    ]
    if not done:
        return ""
    hosts, ranks = list_hosts([host for host, _ in done]), [rank for _, of_node in done for rank in of_node]
    named = f"{', '.join(hosts)} (rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)})"
    return f"all workers on {named} had ended with code 0: did they leave the loop early?"


def _find_stuck(job: Job, root: Root) -> tuple[StuckRank, ...]:
    """Return the ranks that did not stop and waited for nobody.

    If those are as many as the ranks that lost a peer, or more, only those count that had been there before the stop:
    many ranks that do not stop are busy with the stop itself. They save a checkpoint, for example.
    """
    if root.severity < LOST_RANK:
        return ()
    losses = [node.ends for node in _list_members(job) if node.ends is not None]
    has_many = sum(loss.stuck_count for loss in losses) >= sum(loss.failed for loss in losses)
    stuck = (each for loss in losses for each in (loss.stuck[: loss.unmoved] if has_many else loss.stuck))
    return tuple(sorted(stuck, key=lambda each: each.rank))[:_MOST_STUCK]


def _count_equal_errors(job: Job, root: Root) -> EqualErrors | None:
    """Return which workers had the error of the root cause: one node or all is what tells a wrong path there."""
    members = _list_members(job)  # an agent that has left or died since may have reported the same error
    number = None if root.report is None else root.report.get("error")
    has_told = all(node.outcome for node in members)
    if number is None or root.severity >= LOST_RANK or len(members) == 1 or not has_told:
        return None
    errors = [(node, () if node.ends is None else node.ends.errors) for node in members]
    counts = [(node, sum(error.ranks for error in own if error.number == number)) for node, own in errors]
    found = [(node, ranks) for node, ranks in counts if ranks or node.node == root.node]
    hosts = [node.node_info.host for node, _ in found]
    if len(found) == 1:
        hosts = [f"{node.node_info.host} (node {node.rank})" for node, _ in found]
    return EqualErrors(
        ranks=sum(max(1, ranks) for _, ranks in found),
        of_ranks=sum(node.node_info.local_world_size for node, _ in found),
        hosts=list_hosts(hosts),
        nodes=len(found),
        of_nodes=len(members),
    )


# --- nodes that wait -------------------------------------------------------------------------------------------------
def give_up_waiting(job: Job, config: JobConfig, missing: str, *, has_lease: bool) -> Job:
    """End a job for which not enough nodes have come; `missing` says which nodes of an earlier round are needed."""
    count, waited = len(job.waiting), f"{config.join_timeout:g} s"
    if count >= config.min_nodes and not has_lease:
        return end_job(job, "store_lost", f"the lease could not be renewed within {waited}, so no round could form")
    needed = f"the job needs at least {config.min_nodes} {'nodes' if config.min_nodes > 1 else 'node'}"
    if missing and count >= config.min_nodes:
        detail = f"{missing} within {waited}"
    elif job.round is None:
        detail = f"{needed}, but only {count} came within {waited}: {', '.join(list_present(job))}"
    else:
        detail = f"{needed}, but has only {count} left, and no replacement came within {waited}"
    lost, refused = describe_lost(job), describe_refused(job)
    clauses = [detail, describe_missing_ranks(job, config)]
    clauses += [f"lost: {', '.join(lost)}"] if lost else []
    clauses += [f"not in the job: {', '.join(refused)}"] if refused else []
    return end_job(job, "rendezvous" if job.round is None else "nodes_lost", "; ".join(filter(None, clauses)))


def list_present(job: Job) -> tuple[str, ...]:
    """Return the host names of the nodes that are there, or ranges of them."""
    return list_hosts([node.node_info.host for node in job.nodes.values()])


def describe_lost(job: Job) -> tuple[str, ...]:
    """Return clauses for members of the last round that are lost, or unhealthy nodes since, the latest first."""
    lost = []
    for gone in reversed(list(job.gone.values())):
        rank = None if gone.was is None else gone.was.rank
        is_lost = (
            gone.reason == outcomes.UNHEALTHY and not gone.is_told if rank is None else not job.seats[rank].is_awaited
        )
        lost += [(name_host(gone), gone.detail)] if is_lost else []
    return fold_clauses(lost, SHOWN)


def describe_refused(job: Job) -> tuple[str, ...]:
    """Return clauses for the nodes that were refused since the last round was formed, the latest first."""
    refused = [gone for gone in job.gone.values() if gone.reason == REFUSED and not gone.is_told]
    reasons = dict.fromkeys((name_host(gone), f"refused: {gone.detail}") for gone in reversed(refused))
    return fold_clauses(tuple(reasons), SHOWN)


def name_host(gone: Gone) -> str:
    """Return the host name of a node that is gone. A node that never joined has it at the beginning of its id."""
    return gone.node.rsplit("_", 2)[0] if gone.was is None else gone.was.node_info.host
