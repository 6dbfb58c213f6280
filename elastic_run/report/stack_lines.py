"""The lines that say where the workers are, and that the job hangs, on one screen.

Pure: each function returns the text; the console puts `elastic-run: ` in front of it.
"""

from __future__ import annotations

from elastic_run.core.failure.stacks import (
    FAILED,
    HAS_ENDED,
    WAITS,
    WROTE_LAST,
    group_dumps,
    group_places,
    rank_suspicion,
    shorten_groups,
)
from elastic_run.records import replace
from elastic_run.report.text import count, printable, ranks, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_run.core.failure.hang import Stillness
    from elastic_run.core.failure.job_result import RecorderFinding
    from elastic_run.core.failure.stacks import Dump, Group

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
    """Tell where all stacks are, and how the job goes on."""
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


# --- a hang -----------------------------------------------------------------------------------------------------------
#: Groups of ranks that are shown.
_MOST_PLACES = 12
#: Stands for the value of --hang-action where the user has not asked for --hang-timeout.
NOT_ASKED = ""
_NEXT = {
    NOT_ASKED: "the job goes on (--hang-timeout finds a hang sooner, and --hang-action can end it)",
    "report": "the job goes on (--hang-action=report)",
    "restart": "stopping the workers, which start again if a restart is left (--hang-action=restart)",
    "fail": "stopping the job (--hang-action=fail)",
}


def hang_verdict(ranks: Mapping[int, Stillness], ended: Sequence[int] = ()) -> Iterator[str]:
    """Say that the job hangs, which ranks to look at, and where each rank is, the odd one out last."""
    groups = _group_ranks(ranks)
    yield f"the job hangs: {_length(ranks)}{_advise(groups, ended)}"
    yield from map("  {}".format, _places(ranks, groups))
    yield from map("  {}".format, _describe_ended(ended))


def _advise(groups: Sequence[Group], ended: Sequence[int]) -> str:
    """Say which ranks to look at, where others wait for them."""
    odd = _find_odd(groups)
    suspicion, reason = rank_suspicion(odd.place), ""
    it, has, them = ("they", "have", "them") if len(odd.ranks) > 1 else ("it", "has", "it")
    if suspicion == FAILED:
        reason = f"{it} {has} failed and not ended"
    elif suspicion == WROTE_LAST:
        reason = f"{it} {has} written an exception and nothing after it"
    elif any(group.place.is_waiting for group in groups):
        reason = "" if suspicion == WAITS else f"other ranks wait for {them}"
    elif suspicion == HAS_ENDED and len(groups) > 1:
        reason = f"{it} {has} ended the main thread"
    else:
        return ""
    if reason:
        return f"; look at {ranks(odd.ranks)}: {reason}"
    have, them = ("they have", "them") if len(ended) > 1 else ("it has", "it")
    return f"; look at {ranks(ended)}: {have} ended, and other ranks wait for {them}" if ended else ""


def _describe_ended(ended: Sequence[int]) -> Sequence[str]:
    return (f"{ranks(ended)} {'have' if len(ended) > 1 else 'has'} ended with exit code 0",) if ended else ()


def hang_detail(
    ranks: Mapping[int, Stillness], ended: Sequence[int] = (), finding: RecorderFinding | None = None
) -> str:
    """Say the same in one sentence, for the report of a job that has ended by it: the odd one out first."""
    odd = find_odd_rank(ranks, () if finding is None else finding.ranks)
    groups = sorted(_group_ranks(ranks), key=lambda group: odd not in group.ranks)
    said = f"{finding.text}; " if finding is not None and not ended and _do_all_wait(groups) else ""
    return f"{said}{_length(ranks)}: {'; '.join((*_describe_ended(ended), *_places(ranks, groups)))}"


def _length(ranks: Mapping[int, Stillness]) -> str:
    return f"no progress of any rank for {span(min(still.same for still in ranks.values()))}"


def hang_recorder(not_joined: str) -> str:
    """Say which rank did not join a collective."""
    return f"  flight recorder: {not_joined}"


def hang_closing(path: str, action: str, *, failed: int | None = None) -> str:
    """Say where all stacks are, and what follows."""
    next_step = (
        _NEXT[action] if failed is None or action in ("report", NOT_ASKED) else f"rank {failed} counts as failed now"
    )
    return f"{f'all stacks: {path}' if path else '--log-dir keeps all stacks in a file'}; {next_step}"


def find_odd_rank(ranks: Mapping[int, Stillness], accused: Sequence[int] = ()) -> int:
    """Return the first rank of the likeliest, smallest group; if all wait, one that the flight recorder names."""
    groups, running = _group_ranks(ranks), [rank for rank in accused if rank in ranks]
    return running[0] if running and _do_all_wait(groups) else _find_odd(groups).ranks[0]


def _do_all_wait(groups: Sequence[Group]) -> bool:
    return all(group.place.is_waiting for group in groups)


def _find_odd(groups: Sequence[Group]) -> Group:
    return min(groups, key=lambda group: (rank_suspicion(group.place), len(group.ranks), group.ranks))


def _group_ranks(ranks: Mapping[int, Stillness]) -> Sequence[Group]:
    """Group ranks; the flight recorder knows of waits in which no stack shows a collective, as in backward."""
    return group_places({rank: replace(still.place, is_waiting=still.waits) for rank, still in ranks.items()})


def _places(ranks: Mapping[int, Stillness], groups: Sequence[Group]) -> Iterator[str]:
    first, rest, last = shorten_groups(groups, _MOST_PLACES)
    yield from (_place(ranks, group) for group in first)
    if rest:
        yield f"{count(len(rest), 'rank')} elsewhere"
    yield from (_place(ranks, group) for group in last)


def _place(ranks: Mapping[int, Stillness], group: Group) -> str:
    return f"{describe(group)}, {span(min(ranks[rank].same for rank in group.ranks))}"
