"""Parts of the closing report: the lines of a traceback that say most, and how the other workers ended.

Of a traceback, the user's own code and the last frame say most. The other workers get as few lines as possible.
"""

from __future__ import annotations

import re

from elastic_run.core.failure.root_cause import failure_signature, has_equal_error, has_lost_rank
from elastic_run.core.failure.stacks import group_places
from elastic_run.core.failure.traceback_text import FOREIGN_PATHS
from elastic_run.records import dataclass, field
from elastic_run.report.stack_lines import describe
from elastic_run.report.text import elide, exception_line, exit_text, printable, ranks, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from elastic_run.core.failure.root_cause import EqualErrors, ExceptionText, WorkerEnd
    from elastic_run.core.failure.stacks import Place

_FRAME_LINE = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?(?=/python3))/")
#: Where `@record` stands, ours and torch's: in every traceback, and never the reason.
_RECORDERS = (
    "elastic_run/multiprocessing/errors/error_handler.py",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
)
#: Lines of code of one frame, and frames of libraries, that are shown.
_CODE = 2
_LIBRARY_FRAMES = 2


@dataclass(slots=True)
class _Frame:
    """A place in a traceback and the code that stands there."""

    place: str
    is_own: bool
    code: list[str] = field(default_factory=list)


def trace_lines(exception: ExceptionText, *, width: int, most: int) -> list[str]:
    """Choose the lines of a traceback that tell most."""
    frames = _frames(exception)
    chosen: set[int] = set()
    for index in _by_worth(frames):
        if len(_layout(frames, chosen | {index}, width)) > most:
            break
        chosen.add(index)
    return _layout(frames, chosen, width)


def find_own_place(exception: ExceptionText) -> tuple[str, str] | None:
    """Return file and line of the innermost frame of the user's own code, or of the innermost frame of all."""
    found = [match for match in map(_FRAME_LINE.match, exception.lines) if match is not None]
    own = [match for match in found if not any(part in match["file"] for part in FOREIGN_PATHS)]
    place = next(reversed(own or found), None)
    return None if place is None else (printable(place["file"]), place["line"])


def _by_worth(frames: list[_Frame]) -> list[int]:
    """The innermost frame, the user's own from the inside out, and a library's next to the innermost."""
    inside_out = range(len(frames) - 1, -1, -1)
    own = [index for index in inside_out if frames[index].is_own]
    foreign = [index for index in inside_out if not frames[index].is_own][:_LIBRARY_FRAMES]
    return [*dict.fromkeys([*inside_out[:1], *own, *foreign])]


def _frames(exception: ExceptionText) -> list[_Frame]:
    frames: list[_Frame] = []
    is_recorder = False
    for line in exception.lines:
        found = _FRAME_LINE.match(line)
        if found is not None:
            is_recorder = found["file"].endswith(_RECORDERS)
        if is_recorder:
            continue
        if found is not None:
            name = f" in {found['name']}" if found["name"] else ""
            is_own = not any(part in found["file"] for part in FOREIGN_PATHS)
            path = _INSTALLED.sub("", found["file"])
            frames.append(_Frame(printable(f"{path}:{found['line']}{name}"), is_own=is_own))
        elif frames and line.startswith("    ") and line.strip() and len(frames[-1].code) < _CODE:
            frames[-1].code.append(printable(line.strip()))
    return frames


def _layout(frames: list[_Frame], chosen: set[int], width: int) -> list[str]:
    lines: list[str] = []
    before = -1
    for index in sorted(chosen):
        if index != before + 1:
            lines.append("...")
        lines.append(frames[index].place)  # readers copy it
        lines += [f"  {elide(code, width - 2)}" for code in frames[index].code]
        before = index
    return lines


#: Kinds of failure that get a line of their own.
_MOST_KINDS = 2
#: Seconds; below that two ends are one moment.
_SAME_MOMENT = 0.005
SIGKILL = 9


def equal_errors(ends: Sequence[WorkerEnd], root: WorkerEnd, of_job: EqualErrors | None) -> str:
    """Say which workers had the error of the root cause; of a job of several nodes, whether one node or all."""
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


def other_worker_lines(
    ends: Sequence[WorkerEnd], root: WorkerEnd | None, early: AbstractSet[int], *, has_early: bool
) -> list[str]:
    """Describe the workers that are not the root cause, and had another error; `early` are ranks that had ended."""
    others = [end for end in ends if end is not root]
    killed = [end for end in others if end.was_stopped and end.exitcode == -SIGKILL]
    others = [end for end in others if end not in killed and not (root is not None and has_equal_error(end, root))]
    failed = [end for end in others if end.exitcode != 0 and not end.was_stopped]
    obeyed = [end for end in others if end.was_stopped]
    finished = [end for end in others if end.exitcode == 0 and not end.was_stopped and end.rank not in early]
    return [
        *_failures(failed, root),
        *_line(killed, "did not stop in time and {was} killed"),
        *_line(obeyed, "{was} stopped"),
        *([early_exit(root, ends, early)] if root is not None and early and has_early else []),
        *_line(finished, "ended with exit code 0" if early else "had ended with exit code 0"),
    ]


def early_exit(root: WorkerEnd, ends: Sequence[WorkerEnd], early: Collection[int]) -> str:
    """Say which workers had ended with 0, if the other workers only report that they lost a peer."""
    before = span(root.uptime - max(end.uptime for end in ends if end.rank in early))
    they = "it" if len(early) == 1 else "they"
    return f"{ranks(early)} ended with code 0, {before} earlier: did {they} leave the loop early?"


def stuck_workers(stuck: Sequence[int], ends: Sequence[WorkerEnd], of_job: Mapping[int, Place] | None) -> str:
    """Say where the workers were that did not stop, if the other workers only report that they lost a peer."""
    places = of_job or {end.rank: end.stuck_at for end in ends if end.rank in stuck and end.stuck_at is not None}
    they = "it" if len(stuck) == 1 else "they"
    where = "; ".join(map(describe, group_places(places)))
    return f"{where}: {they} did not stop, and SIGKILL ended {they.replace('they', 'them')}"


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
