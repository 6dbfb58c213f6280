"""What a round that has stopped everywhere means: a restart, a change of membership, or the end of the job."""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.contract import EXIT_CODES, EXIT_RENDEZVOUS
from elastic_run.core.failure.root_cause import BARE_END, LOST_RANK, SECONDARY_FAILURE
from elastic_run.core.job.exclusion import exclude, judge, note_incident
from elastic_run.core.job.host_lists import fold_clauses, fold_hosts, list_hosts
from elastic_run.core.job.ranks import assign_worker_ranks, list_ranks
from elastic_run.core.job.restart_policy import RULE_DECISIONS, Failure, GiveUp, decide_restart
from elastic_run.core.job.state import (
    GATHERING,
    PAUSING,
    REFUSED,
    REMEMBERED,
    Gone,
    Job,
    Root,
    name_host,
    remember,
)
from elastic_run.core.protocol.codec import encode
from elastic_run.core.protocol.facts import End, EqualErrors
from elastic_run.core.protocol.outcomes import CANNOT_START, DONE, UNHEALTHY, UNREACHABLE
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.documents import RoundEnd
    from elastic_run.core.job.state import Node
    from elastic_run.core.protocol.codec import Document
    from elastic_run.core.protocol.facts import StuckRank

#: Bytes of a report that are kept, and of one of its values where it is longer.
_REPORT_BYTES = 64 * 1024
_VALUE_BYTES = 1024
_SIGNATURE_LENGTH = 1024
_RULE_LENGTH = 80
_EXIT_CODES = {name: code for code, name, _ in EXIT_CODES if isinstance(code, int)}


def verdict_exit_code(verdict: str) -> int:
    """Return the exit code of a verdict that has one of its own, else 1."""
    return _EXIT_CODES.get(verdict, 1)


def read_report(node: str, end: RoundEnd, order: int) -> Root:
    """Return the failure that a node reports.

    Args:
        node: The node.
        end: How the round has ended on it.
        order: The failure's place in the order in which the failures of the round were heard.

    Returns:
        The failure; values that are missing or garbage have their defaults.
    """
    report = end.report or {}
    decision, rule = report.get("decision"), report.get("rule")
    code, uptime, severity = report.get("exit_code"), report.get("uptime"), report.get("severity")
    signature = report.get("signature")
    own = {UNREACHABLE: "rendezvous", CANNOT_START: end.verdict or "cannot_start"}.get(end.outcome, "")
    fallback = EXIT_RENDEZVOUS if end.outcome == UNREACHABLE else verdict_exit_code(own)
    return Root(
        node=node,
        # Who could not reach the master's node may see no more than that it died.
        severity=LOST_RANK if end.outcome == UNREACHABLE else severity if _is_integer(severity) else BARE_END,
        order=order,
        failure=Failure(
            exit_code=code if _is_integer(code) and code != 0 else fallback,
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


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


#: Characters of what a node says of its failure in a line.
_SUMMARY_LENGTH = 200
#: Names that a line for the user holds.
_SHOWN = 8
#: Ranks that did not stop which the end of the job names.
_MOST_STUCK = 64


@dataclass(frozen=True, slots=True)
class Settled:
    """What follows: the state, gathering or pausing, or the end."""

    job: Job
    end: End | None = None


def settle(job: Job, config: JobConfig, *, now: float, jitter: float) -> Settled:
    """Decide what follows a round of which nothing lives any more: every member is ready or gone."""
    root = job.root
    if root is not None and root.severity >= SECONDARY_FAILURE and job.hidden is not None:
        root = job.hidden
    if root is None or (job.has_lost and root.severity >= SECONDARY_FAILURE):
        return _settle_change(job, config, now, is_loss=job.has_lost)
    job = note_incident(job, config, root, now)
    judgement = judge(job, config, root)
    if judgement.excludes and judgement.is_named:
        settled = _settle_change(replace(job, attempts=remember(job.attempts, root.report)), config, now, is_loss=True)
    else:
        settled = _settle_failure(job, config, root, now=now, jitter=jitter)
    if settled.end is not None or not judgement.reason:
        return settled
    if judgement.excludes:
        return Settled(exclude(settled.job, root, judgement, now))
    host = job.nodes[root.node].node_info.host
    kept = f"{host} stays in the job although it was {judgement.reason}: {judgement.kept_because}"
    return Settled(replace(settled.job, news="; ".join(filter(None, (settled.job.news, kept)))))


def change_allowed_at(job: Job, config: JobConfig) -> float:
    """Return from when on the membership may change once more; infinity for never."""
    window = config.membership_window
    if window is None or len(job.changes) < window.count:
        return -math.inf
    if window.count == 0 or window.seconds is None:
        return math.inf
    return job.changes[-window.count] + window.seconds


def describe_lost(job: Job, limit: int = 8) -> tuple[str, ...]:
    """Return clauses for the nodes that the job has lost since the last round was formed, the latest first.

    These are the members of that round, but for those that may yet come, and nodes that were unhealthy before they
    joined.
    """
    lost = [gone for gone in job.gone.values() if _is_lost(job, gone)]
    return fold_clauses([(name_host(gone), gone.detail) for gone in reversed(lost)], limit)


def _is_lost(job: Job, gone: Gone) -> bool:
    if gone.was is None or gone.was.rank is None:
        return gone.reason == UNHEALTHY and not gone.is_told
    return not job.seats[gone.was.rank].is_awaited


def describe_refused(job: Job, limit: int) -> tuple[str, ...]:
    """Return clauses for the nodes that were refused since the last round was formed, the latest first."""
    refused = [gone for gone in job.gone.values() if gone.reason == REFUSED and not gone.is_told]
    reasons = dict.fromkeys((name_host(gone), f"refused: {gone.detail}") for gone in reversed(refused))
    return fold_clauses(tuple(reasons), limit)


def end_with(job: Job, root: Root, verdict: str, detail: str) -> End:
    """Return the end of a job whose cause is known."""
    return End(
        term=job.term,
        verdict=verdict,
        exit_code=root.failure.exit_code if verdict in ("worker_failed", root.verdict) else verdict_exit_code(verdict),
        detail=detail,
        root=root.report,
        attempts=job.attempts,
        stuck=_find_stuck(job, root),
        equal_errors=_count_equal_errors(job, root),
    )


def _settle_change(job: Job, config: JobConfig, now: float, *, is_loss: bool) -> Settled:
    window = config.membership_window
    if window is not None and is_loss and now < change_allowed_at(job, config):
        per = "" if window.seconds is None else f" per {window.seconds:g} s"
        detail = f"more than {window.count} changes of membership{per}; lost: {', '.join(describe_lost(job))}"
        report = None if job.root is None else job.root.report
        code = verdict_exit_code("nodes_lost")
        return Settled(job, End(job.term, "nodes_lost", code, detail, report, job.attempts))
    kept = (*job.changes, now)[-((window and window.count) or 1) :]
    return Settled(clear_round(replace(job, changes=kept, news=""), GATHERING, now))


def _settle_failure(job: Job, config: JobConfig, root: Root, *, now: float, jitter: float) -> Settled:
    failures = (*job.failures, root.failure)[-REMEMBERED:]
    # Restarts that are too old to be remembered count, and are out of every window.
    # Another coordinator may have decided the restart after this round already.
    used = max(job.round_restarts, job.restart_count - 1)
    answer = decide_restart(config, failures, job.restart_times, now, jitter, used=used)
    if isinstance(answer, GiveUp):
        own = root.verdict if answer.verdict == "worker_failed" else ""
        detail = "; ".join(text for text in (answer.detail or root.detail, _describe_early(job, root)) if text)
        return Settled(job, end_with(job, root, own or answer.verdict, detail))
    kept = max(REMEMBERED, config.restart_window.count if config.restart_window else 0)
    job = replace(
        job,
        restart_count=used + 1,
        restart_times=(*job.restart_times, now)[-kept:],
        failures=failures,
        attempts=remember(job.attempts, root.report),
        news=_summary(root),
    )
    if answer.delay > 0:
        return Settled(replace(clear_round(job, PAUSING, now), until=now + answer.delay))
    return Settled(clear_round(job, GATHERING, now))


def _describe_early(job: Job, root: Root) -> str:
    """Name the nodes whose workers ended well, where the others knew no more than that they had lost a peer."""
    if root.severity < LOST_RANK:
        return ""
    members = sorted(_list_members(job), key=lambda node: -1 if node.rank is None else node.rank)
    places = assign_worker_ranks([(node.node_info.role, node.node_info.local_world_size) for node in members])
    done = [
        (node.node_info.host, range(place.base_rank, place.base_rank + node.node_info.local_world_size))
        for node, place in zip(members, places, strict=True)
        if node.outcome == DONE
    ]
    if not done:
        return ""
    hosts = [f"{host} ({_name_ranks(ranks)})" for host, ranks in done]
    if len(done) > _SHOWN:
        folded, ranks = fold_hosts(host for host, _ in done), [rank for _, of_node in done for rank in of_node]
        hosts = [f"{', '.join(folded)} ({_name_ranks(ranks)})"]
    return f"all workers on {', '.join(hosts)} had ended with code 0: did they leave the loop early?"


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


def _list_members(job: Job) -> list[Node]:
    """Return the nodes of the round, those that are gone as they were."""
    return [*job.members, *(gone.was for gone in job.gone_members if gone.was is not None)]


def _count_equal_errors(job: Job, root: Root) -> EqualErrors | None:
    """Return which workers had the error of the root cause: one node or all is what tells a wrong path there."""
    members = _list_members(job)  # an agent that has left or died since may have reported the same error
    number = None if root.report is None else root.report.get("error")
    has_told = all(node.outcome for node in members)
    if number is None or root.severity >= LOST_RANK or len(members) == 1 or not has_told:
        return None
    counts = [(node, _count_error(node, number)) for node in members]
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


def _count_error(node: Node, number: object) -> int:
    errors = () if node.ends is None else node.ends.errors
    return next((error.ranks for error in errors if error.number == number), 0)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"


def _summary(root: Root) -> str:
    summary = None if root.report is None else root.report.get("summary")
    return summary[:_SUMMARY_LENGTH] if isinstance(summary, str) else ""


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
