"""Evidence to causes, the likeliest first. Pure, and imported only after a failure.

Rules
- A failure of a worker's own, by `severity`, is the cause. The kernel's log, else the OOM killer's counters, tell where
  a SIGKILL came from.
- If all failures are of a lost peer, the cause is elsewhere: at nodes that the job has lost, at a rank that had ended
  with code 0 while the others went on, at the rank that the flight recorder names, or at a rank that did not stop and
  waited for nobody. A rank that had ended and that the flight recorder names, too, comes first.
- A flight recorder that has not seen all ranks of the job accuses nobody above the failure itself.
- Different versions of torch on the nodes are possible causes of any failure: they are told beside it.
- Failures that are equal (`has_equal_error`) are one cause of several ranks.
"""

from __future__ import annotations

import re

from elastic_run.contract import HANG
from elastic_run.core.failure.evidence import (
    CERTAIN,
    COLLECTIVE,
    EARLY_EXIT,
    END,
    EXCEPTION,
    GPU_DEFECT,
    HUNG,
    LIKELY,
    LOG_DISK_FULL,
    LOST_PEER,
    NODE_EVENT,
    OOM_KILL,
    OTHER_VERSION,
    OWN_ADDRESS,
    POSSIBLE,
    STUCK,
    Cause,
)
from elastic_run.core.failure.exit_code_hints import help_against_end
from elastic_run.core.failure.kernel_log import is_gpu_defect, is_oom_kill
from elastic_run.core.failure.root_cause import has_equal_error, has_lost_rank, is_secondary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.diagnosis.stack_groups import Place
    from elastic_run.core.failure.evidence import Evidence, Rule
    from elastic_run.core.failure.root_cause import WorkerEnd

#: Characters of a text in which a rule's expression is searched for.
_MOST = 8 * 1024
SIGKILL = 9
#: The address at which a client of torch's store has found nobody.
_UNANSWERED = re.compile(r"client socket has [^()\n]*\([^()\n]*, (\d{1,5})\)")


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """Return the causes of a failure.

    Args:
        evidence: What is known.

    Returns:
        The likeliest first; none where nothing points anywhere.
    """
    root = evidence.root
    event = (Cause(NODE_EVENT, (), CERTAIN, (evidence.node_event,)),) if evidence.node_event else ()
    if root is None:
        return (*event, *_collective(evidence, LIKELY))
    versions = (Cause(OTHER_VERSION, (), POSSIBLE, (evidence.versions,)),) if evidence.versions else ()
    if not has_lost_rank(root):
        own = (_own_failure(root, evidence),)
        first = (*event, *own) if is_secondary(root) else (*own, *event)
        return (*first, *versions, *_collective(evidence, POSSIBLE))
    early, collective = _early_exit(root, evidence), _collective(evidence, LIKELY)
    accused = {rank for cause in collective for rank in cause.ranks}
    elsewhere = [*early, *collective] if accused & {rank for cause in early for rank in cause.ranks} else None
    if elsewhere is None:
        elsewhere = [*collective, *early]
    return (*event, *elsewhere, *_stuck(root, evidence), _own_failure(root, evidence), *versions)


def find_rule(rules: Sequence[Rule], said: str, kind: str = "") -> Rule | None:
    """Return the first rule that fits, or None.

    Args:
        rules: In their order.
        said: The exception of the worker, or the end of its stderr.
        kind: The kind of the cause.
    """
    return next((rule for rule in rules if rule.cause in ("", kind) and re.search(rule.match, said)), None)


def last_words(end: WorkerEnd) -> str:
    """Return the text in which rules are searched for.

    It is the worker's exception, else the end of its stderr, and the line of the kernel's log.
    """
    exception = end.certain_exception
    if exception is None:
        said = "\n".join(end.stderr_tail)[-_MOST:]
    else:
        said = f"{exception.type}: {exception.message[:_MOST]}\n{exception.cause}"
    return f"{said}\n{end.kernel_line}" if end.kernel_line else said


def find_early_ends(root: WorkerEnd, ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    """Return the workers that had ended with 0 when another one lost a peer; none where that one failed by itself."""
    if not has_lost_rank(root):
        return []
    return [end for end in ends if end.exitcode == 0 and not end.was_stopped and end.uptime < root.uptime]


def is_stuck(end: WorkerEnd) -> bool:
    """Whether a worker did not stop, and waited for nobody."""
    return end.stuck_at is not None and not end.stuck_at.is_waiting


def has_failed(end: WorkerEnd) -> bool:
    """Whether a worker failed by itself."""
    return end.exitcode != 0 and not end.was_stopped


def find_stuck(
    root: WorkerEnd, ends: Sequence[WorkerEnd], of_job: Mapping[int, Place] | None = None
) -> Mapping[int, Place]:
    """Return the places of ranks that did not stop and waited for nobody.

    If those are as many as the ranks that failed, or more, only those count that had been there before the stop: many
    workers that do not stop are busy with the stop itself. They save a checkpoint, for example.

    Args:
        root: The first failure; only if that is a lost peer, others are asked for the cause.
        ends: How the workers of this node ended.
        of_job: The places that a job of several nodes has found at its end, or None.
    """
    if not has_lost_rank(root):
        return {}
    if of_job is not None:
        return of_job
    stuck = [end for end in ends if is_stuck(end)]
    if len(stuck) >= sum(map(has_failed, ends)):
        stuck = [end for end in stuck if end.is_unmoved]
    return {end.rank: end.stuck_at for end in stuck if end.stuck_at is not None}


def _own_failure(root: WorkerEnd, evidence: Evidence) -> Cause:
    ranks = _equal_ranks(root, evidence.ends)
    if evidence.is_log_disk_full:
        return Cause(LOG_DISK_FULL, ranks, LIKELY, ("nothing more fits on the disk of the log files",))
    kind, confidence, why = _classify(root)
    said = last_words(root)
    kind_of_rule = OWN_ADDRESS if _meets_elsewhere(said, evidence.store_port) else kind
    rule = evidence.rule or find_rule(evidence.rules, said, kind_of_rule)
    return Cause(kind, ranks, confidence, why, help_against_end(root) if rule is None else rule.help)


def _meets_elsewhere(said: str, store_port: int | None) -> bool:
    """Whether a client has waited at another port than that of the store which an agent serves."""
    unanswered = _UNANSWERED.search(said)
    return store_port is not None and unanswered is not None and int(unanswered[1]) != store_port


def _classify(root: WorkerEnd) -> tuple[str, str, tuple[str, ...]]:
    """Return kind, confidence and reasons of a worker's failure."""
    logged = (f"the kernel's log: {root.kernel_line}",) if root.kernel_line else ()
    if is_oom_kill(root.kernel_line):
        return OOM_KILL, CERTAIN, logged
    if is_gpu_defect(root.kernel_line):
        return GPU_DEFECT, LIKELY, logged
    if has_lost_rank(root):
        return LOST_PEER, POSSIBLE, ("its error is typical of a rank that has lost a peer",)
    if root.exception is not None:
        is_hang, is_certain = root.exception.type == HANG, root.exception.is_certain
        why = ("no rank made progress", "its stacks at two moments are equal")
        said = ("the exception at the end of its stderr", *logged)
        kind = HUNG if is_hang else EXCEPTION
        return kind, CERTAIN if is_certain and not is_hang else LIKELY, why if is_hang else said
    kills = root.oom_kills
    if root.signal == SIGKILL and kills is not None and (kills.group or kills.machine):
        who = "the job's cgroup" if kills.group else "the machine"
        return OOM_KILL, CERTAIN if kills.group else LIKELY, ("SIGKILL", f"{who} counts kills of the OOM killer")
    return END, CERTAIN, ("its exit status", *logged)


def _early_exit(root: WorkerEnd, evidence: Evidence) -> tuple[Cause, ...]:
    early = find_early_ends(root, evidence.ends)
    if not early:
        return ()
    why = ("exit code 0 while the others went on", "all failures are of a lost peer")
    return (Cause(EARLY_EXIT, tuple(sorted(end.rank for end in early)), LIKELY, why),)


def _stuck(root: WorkerEnd, evidence: Evidence) -> tuple[Cause, ...]:
    stuck = find_stuck(root, evidence.ends, evidence.stuck)
    if not stuck:
        return ()
    why = ("it did not stop, and its stacks show no wait for others", "all failures are of a lost peer")
    return (Cause(STUCK, tuple(sorted(stuck)), LIKELY, why),)


def _collective(evidence: Evidence, confidence: str) -> tuple[Cause, ...]:
    found = evidence.recorder
    if found is None or not found.ranks or not found.is_whole_job:
        return ()
    return (Cause(COLLECTIVE, found.ranks, confidence, ("the dumps of the flight recorder",)),)


def _equal_ranks(root: WorkerEnd, ends: Sequence[WorkerEnd]) -> tuple[int, ...]:
    """Return the ranks that failed like a worker, its own first."""
    return (root.rank, *sorted(end.rank for end in ends if end.rank != root.rank and has_equal_error(end, root)))
