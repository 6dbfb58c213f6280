"""How the workers ended that are not the root cause, in as few lines as possible."""

from __future__ import annotations

from elastic_run.core.diagnosis.stacks import group_places
from elastic_run.core.failure.diagnose import find_early_ends, find_stuck
from elastic_run.core.failure.root_cause import failure_signature, has_equal_error, has_lost_rank
from elastic_run.report.stack_lines import describe
from elastic_run.report.text import printable
from elastic_run.report.wording import exception_line, exit_text, ranks, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.diagnosis.stacks import Place
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.protocol.decisions import EqualErrors

#: Kinds of failure that get a line of their own.
_MOST_KINDS = 2
#: Seconds; below that two ends are one moment.
_SAME_MOMENT = 0.005
SIGKILL = 9


def equal_errors(ends: Sequence[WorkerEnd], root: WorkerEnd, of_job: EqualErrors | None) -> str:
    """Say which workers had the error of the root cause; of a job of several nodes, whether one node or all.

    Args:
        ends: How the workers of this node ended.
        root: The worker that failed first.
        of_job: What the job knows of all its nodes, or None.

    Returns:
        A sentence; "" where no other worker is known to have had it, but for the only worker of a node.
    """
    what = "failure" if root.certain_exception is None else root.certain_exception.type
    if of_job is None:
        equal = [end.rank for end in ends if end is not root and has_equal_error(end, root)]
        return f"{ranks(equal)} had the same {what}" if equal else ""
    counted, hosts = f"{of_job.ranks} of {of_job.of_ranks} ranks", printable(", ".join(of_job.hosts))
    others = of_job.of_nodes - of_job.nodes
    if not others:
        is_all = of_job.ranks == of_job.of_ranks
        return f"{f'all {of_job.ranks} ranks' if is_all else f'{counted} on {hosts}'} had the same {what}"
    if of_job.ranks == 1 < of_job.of_ranks:
        return ""
    rest = f"no rank of the {f'{others} other nodes' if others > 1 else 'other node'} had it before the stop"
    if of_job.nodes > 1:
        return f"{counted} on {hosts} had the same {what}: {rest}"
    return f"only {hosts} had this {what}{f', on {counted}' if of_job.of_ranks > 1 else ''}: {rest}"


def other_worker_lines(ends: Sequence[WorkerEnd], root: WorkerEnd | None, *, has_early: bool) -> list[str]:
    """Describe the workers that are not the root cause, and had another error.

    Args:
        ends: How the workers ended.
        root: The worker that failed first, or None.
        has_early: Whether those are described that had ended with 0 when the root cause lost a peer.

    Returns:
        At most six lines, the failures first.
    """
    others = [end for end in ends if end is not root]
    killed = [end for end in others if end.was_stopped and end.exitcode == -SIGKILL]
    others = [end for end in others if end not in killed and not (root is not None and has_equal_error(end, root))]
    failed = [end for end in others if end.exitcode != 0 and not end.was_stopped]
    obeyed = [end for end in others if end.was_stopped]
    early = [] if root is None else find_early_ends(root, ends)
    finished = [end for end in others if end.exitcode == 0 and not end.was_stopped and end not in early]
    return [
        *_failures(failed, root),
        *_line(killed, "did not stop in time and {was} killed"),
        *_line(obeyed, "{was} stopped"),
        *([early_exit(root, ends)] if root is not None and early and has_early else []),
        *_line(finished, "ended with exit code 0" if early else "had ended with exit code 0"),
    ]


def early_exit(root: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
    """Say which workers had ended with 0, if the other workers only report that they lost a peer.

    Args:
        root: The first failure, of a lost peer.
        ends: How the workers ended; one of them had ended with 0 before it.
    """
    early = find_early_ends(root, ends)
    before = span(max(0.0, root.uptime - max(end.uptime for end in early)))
    they = "it" if len(early) == 1 else "they"
    who = ranks(end.rank for end in early)
    return f"{who} ended with code 0, {before} earlier: did {they} leave the loop early?"


def stuck_workers(root: WorkerEnd, ends: Sequence[WorkerEnd], of_job: Mapping[int, Place] | None) -> str:
    """Say where the workers were that did not stop, if the other workers only report that they lost a peer.

    Args:
        root: The first failure, of a lost peer.
        ends: How the workers ended.
        of_job: See `find_stuck`.
    """
    stuck = find_stuck(root, ends, of_job)
    groups = group_places(stuck)
    they = "it" if len(stuck) == 1 else "they"
    return f"{'; '.join(map(describe, groups))}: {they} did not stop, and SIGKILL ended {they.replace('they', 'them')}"


def _line(ends: list[WorkerEnd], what: str) -> list[str]:
    if not ends:
        return []
    return [f"{ranks(end.rank for end in ends)} {what.format(was='was' if len(ends) == 1 else 'were')}"]


def _failures(failed: list[WorkerEnd], root: WorkerEnd | None) -> list[str]:
    kinds: dict[tuple[int | str, ...], list[WorkerEnd]] = {}
    for end in sorted(failed, key=lambda end: (end.uptime, end.rank)):
        kinds.setdefault(failure_signature(end)[:3], []).append(end)
    groups = list(kinds.values())
    lines = [_failure(group, root) for group in groups[:_MOST_KINDS]]
    rest = [end for group in groups[_MOST_KINDS:] for end in group]
    return lines + _line(rest, "failed in other ways")


def _failure(group: list[WorkerEnd], root: WorkerEnd | None) -> str:
    first = group[0]
    who = ranks(end.rank for end in group)
    if root is None:
        return f"{who} failed{_reason(first)}"
    why = " as a consequence" if has_lost_rank(first) else ""
    # The round starts on another host a moment earlier or later.
    when = f" {_distance(first.uptime - root.uptime)}" if first.host == root.host else ""
    return f"{who} failed{why}{when}{_reason(first)}"


def _reason(end: WorkerEnd) -> str:
    if end.certain_exception is None:
        return f" ({exit_text(end)})"
    line = printable(exception_line(end.certain_exception))
    # The failure is known to be a lost peer, so the exception's type and the advice in its message are left out.
    return f": {line.partition(': ')[2].split('. ')[0] or line}" if has_lost_rank(end) else f": {line}"


def _distance(seconds: float) -> str:
    if abs(seconds) < _SAME_MOMENT:
        return "at the same moment"
    return f"{span(abs(seconds))} {'later' if seconds > 0 else 'earlier'}"
