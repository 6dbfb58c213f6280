"""The lines that say where the workers are.

Pure: each function returns the text; the console puts `elastic-run: ` in front of it.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stacks import group_dumps, shorten_groups
from elastic_run.report.text import printable
from elastic_run.report.wording import ranks, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_run.core.diagnosis.stacks import Dump, Group

#: Groups that a line names, and calls of each that are shown.
_GROUPS = 8
_FRAMES = 10
#: Seconds without output from which on a line tells them.
_SILENCE = 10.0


def summary(dumps: Mapping[int, Dump]) -> str:
    """Tell where the ranks are, group by group; groups that do not wait, and groups without stacks, come last."""
    first, rest, last = shorten_groups(group_dumps(dumps), _GROUPS)
    before, after = ([describe(group) + _describe_silence(group, dumps) for group in part] for part in (first, last))
    return "; ".join([*before, *([f"{ranks(rest)} elsewhere"] if rest else []), *after])


def details(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Show the main thread of one rank of each group."""
    first, _, last = shorten_groups(group_dumps(dumps), _GROUPS)
    for group in (*first, *last):
        if group.thread is None or not group.thread.frames:
            continue
        yield f"{ranks(group.ranks)}, innermost call first:"
        for frame in group.thread.frames[:_FRAMES]:
            yield f"  {printable(frame.file)}:{frame.line} in {printable(frame.function)}"
        left_out = len(group.thread.frames) - _FRAMES
        if left_out > 0:
            yield f"  ({left_out} more)"


def rank_lines(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Show all threads of some ranks, and their state in the kernel."""
    for rank, dump in sorted(dumps.items()):
        yield f"=== rank {rank}{f': {printable(dump.problem)}' if dump.problem else ''}"
        yield from map(printable, (dump.text + dump.details).splitlines())


def closing(path: str, seconds: float | None) -> str:
    """Tell where all stacks are, and how the job goes on.

    Args:
        path: The file with all stacks, or "".
        seconds: Time in which a second SIGQUIT stops the job; None if the job is stopping.
    """
    where = f"all stacks: {path}" if path else "--log-dir keeps all stacks in a file"
    return f"{where}; " + ("the job is stopping" if seconds is None else _goes_on(seconds))


def no_workers(state: str, seconds: float) -> str:
    """Say that there are no stacks to show."""
    return f"no worker runs now, the job is {state}; {_goes_on(seconds)}"


def _goes_on(seconds: float) -> str:
    return f"the job goes on (a second SIGQUIT within {seconds:g} s stops it)"


def overdue(dumps: Mapping[int, Dump], path: str) -> str:
    """Tell where the workers are that have not stopped in the grace period."""
    return f"not stopped yet, SIGKILL follows: {summary(dumps)}{f' (all stacks: {path})' if path else ''}"


def _describe_silence(group: Group, dumps: Mapping[int, Dump]) -> str:
    """Tell for how long a group has written nothing, if that is long and known of all its ranks."""
    known = [silence for rank in group.ranks if (silence := dumps[rank].silence) is not None]
    if len(known) < len(group.ranks) or min(known) < _SILENCE:
        return ""
    return f", no output for {span(int(min(known))).replace('.0 s', ' s')}"


def describe(group: Group) -> str:
    """Say which ranks are where, in one clause."""
    place, are_many = group.place, len(group.ranks) > 1
    if place.problem:
        return f"{ranks(group.ranks)}{': each' if are_many else ''} {printable(place.problem)}"
    verb = ("wait" if are_many else "waits") if place.is_waiting else ("are" if are_many else "is")
    at = f" ({printable(place.file.rpartition('/')[2])}:{place.line})" if place.file else ""
    return f"{ranks(group.ranks)} {verb} in {printable(place.function)}{at}"
