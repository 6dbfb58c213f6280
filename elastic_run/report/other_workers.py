"""How the workers ended that are not the root cause, in as few lines as possible."""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_groups import group_places
from elastic_run.core.failure.diagnose import find_early_ends, find_stuck
from elastic_run.core.failure.root_cause import failure_signature, is_secondary
from elastic_run.report.stack_lines import describe
from elastic_run.report.text import printable
from elastic_run.report.wording import exception_line, exit_text, ranks, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.diagnosis.stack_groups import Place
    from elastic_run.core.failure.root_cause import WorkerEnd

#: Kinds of failure that get a line of their own.
_MOST_KINDS = 2
#: Seconds; below that two ends are one moment.
_SAME_MOMENT = 0.005
SIGKILL = 9


def other_worker_lines(ends: Sequence[WorkerEnd], root: WorkerEnd | None, *, has_early: bool) -> list[str]:
    """Describe the workers that are not the root cause.

    Args:
        ends: How the workers ended.
        root: The worker that failed first, or None.
        has_early: Whether those are described that had ended with 0 when the root cause lost a peer.

    Returns:
        At most six lines, the failures first.
    """
    others = [end for end in ends if end is not root]
    failed = [end for end in others if end.exitcode != 0 and not end.was_stopped]
    stopped = [end for end in others if end.was_stopped]
    killed = [end for end in stopped if end.exitcode == -SIGKILL]
    obeyed = [end for end in stopped if end.exitcode != -SIGKILL]
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
    before = span(max(0.0, root.ended_at - max(end.ended_at for end in early)))
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
    for end in sorted(failed, key=lambda end: (end.ended_at, end.rank)):
        kinds.setdefault(failure_signature(end)[:3], []).append(end)
    groups = list(kinds.values())
    lines = [_failure(group, root) for group in groups[:_MOST_KINDS]]
    rest = [end for group in groups[_MOST_KINDS:] for end in group]
    return lines + _line(rest, "failed in other ways")


def _failure(group: list[WorkerEnd], root: WorkerEnd | None) -> str:
    first, last = group[0], group[-1]
    who = ranks(end.rank for end in group)
    if root is None:
        return f"{who} failed{_reason(first)}"
    if failure_signature(first)[:3] == failure_signature(root)[:3]:
        return f"{who} failed in the same way {_distance(last.ended_at - root.ended_at)}"
    why = " as a consequence" if is_secondary(first) else ""
    return f"{who} failed{why} {_distance(first.ended_at - root.ended_at)}{_reason(first)}"


def _reason(end: WorkerEnd) -> str:
    if end.certain_exception is None:
        return f" ({exit_text(end)})"
    line = printable(exception_line(end.certain_exception))
    # The failure is known to be a lost peer, so the exception's type and the advice in its message are left out.
    return f": {line.partition(': ')[2].split('. ')[0] or line}" if is_secondary(end) else f": {line}"


def _distance(seconds: float) -> str:
    if abs(seconds) < _SAME_MOMENT:
        return "at the same moment"
    return f"{span(abs(seconds))} {'later' if seconds > 0 else 'earlier'}"
