"""The lines that say that the job hangs, on one screen.

Pure: each function returns the text; the console puts `elastic-run: ` in front of it.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stacks import (
    FAILED,
    HAS_ENDED,
    WAITS,
    WROTE_LAST,
    group_places,
    rank_suspicion,
    shorten_groups,
)
from elastic_run.records import replace
from elastic_run.report.stack_lines import describe
from elastic_run.report.wording import count, span
from elastic_run.report.wording import ranks as name_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_run.core.diagnosis.hang import Stillness
    from elastic_run.core.diagnosis.stacks import Group
    from elastic_run.core.failure.diagnose import RecorderFinding

#: Groups of ranks that are shown.
_GROUPS = 12
#: Stands for the value of --hang-action where the user has not asked for --hang-timeout.
NOT_ASKED = ""
_NEXT = {
    NOT_ASKED: "the job goes on (--hang-timeout finds a hang sooner, and --hang-action can end it)",
    "report": "the job goes on (--hang-action=report)",
    "restart": "stopping the workers, which start again if a restart is left (--hang-action=restart)",
    "fail": "stopping the job (--hang-action=fail)",
}


def verdict(ranks: Mapping[int, Stillness], ended: Sequence[int] = ()) -> Iterator[str]:
    """Say that the job hangs, which ranks to look at, and where each rank is, the odd one out last.

    Args:
        ranks: How long each rank of the job has been still, by global rank.
        ended: Ranks that have ended well.
    """
    groups = _groups(ranks)
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
        return f"; look at {name_ranks(odd.ranks)}: {reason}"
    have, them = ("they have", "them") if len(ended) > 1 else ("it has", "it")
    return f"; look at {name_ranks(ended)}: {have} ended, and other ranks wait for {them}" if ended else ""


def _describe_ended(ended: Sequence[int]) -> Sequence[str]:
    return (f"{name_ranks(ended)} {'have' if len(ended) > 1 else 'has'} ended with exit code 0",) if ended else ()


def detail(ranks: Mapping[int, Stillness], ended: Sequence[int] = (), finding: RecorderFinding | None = None) -> str:
    """Say the same in one sentence, for the report of a job that has ended by it: the odd one out first.

    Args:
        ranks: How long each rank of the job has been still, by global rank.
        ended: Ranks that have ended well.
        finding: The finding of the flight recorder. It comes first if all ranks wait: then no place tells the cause.
    """
    odd = find_odd_rank(ranks, () if finding is None else finding.ranks)
    groups = sorted(_groups(ranks), key=lambda group: odd not in group.ranks)
    said = f"{finding.text}; " if finding is not None and not ended and _do_all_wait(groups) else ""
    return f"{said}{_length(ranks)}: {'; '.join((*_describe_ended(ended), *_places(ranks, groups)))}"


def _length(ranks: Mapping[int, Stillness]) -> str:
    return f"no progress of any rank for {span(min(still.same for still in ranks.values()))}"


def recorder(not_joined: str) -> str:
    """Say which rank did not join a collective."""
    return f"  flight recorder: {not_joined}"


def closing(path: str, action: str, *, failed: int | None = None) -> str:
    """Say where all stacks are, and what follows.

    Args:
        path: The file of the stacks, or "".
        action: The value of --hang-action, or `NOT_ASKED`.
        failed: A rank that has failed and does not end, or None.
    """
    next_step = (
        _NEXT[action] if failed is None or action in ("report", NOT_ASKED) else f"rank {failed} counts as failed now"
    )
    return f"{f'all stacks: {path}' if path else '--log-dir keeps all stacks in a file'}; {next_step}"


def find_odd_rank(ranks: Mapping[int, Stillness], accused: Sequence[int] = ()) -> int:
    """Return the first rank of the likeliest, smallest group; if all wait, one that the flight recorder names.

    Args:
        ranks: How long each rank of the job has been still, by global rank.
        accused: The ranks that the flight recorder names; one of them may have ended.
    """
    groups, running = _groups(ranks), [rank for rank in accused if rank in ranks]
    return running[0] if running and _do_all_wait(groups) else _find_odd(groups).ranks[0]


def _do_all_wait(groups: Sequence[Group]) -> bool:
    return all(group.place.is_waiting for group in groups)


def _find_odd(groups: Sequence[Group]) -> Group:
    return min(groups, key=lambda group: (rank_suspicion(group.place), len(group.ranks), group.ranks))


def _groups(ranks: Mapping[int, Stillness]) -> Sequence[Group]:
    """Put ranks together; the flight recorder knows of waits in which no stack shows a collective, as in backward."""
    return group_places({rank: replace(still.place, is_waiting=still.waits) for rank, still in ranks.items()})


def _places(ranks: Mapping[int, Stillness], groups: Sequence[Group]) -> Iterator[str]:
    first, rest, last = shorten_groups(groups, _GROUPS)
    yield from (_place(ranks, group) for group in first)
    if rest:
        yield f"{count(len(rest), 'rank')} elsewhere"
    yield from (_place(ranks, group) for group in last)


def _place(ranks: Mapping[int, Stillness], group: Group) -> str:
    return f"{describe(group)}, {span(min(ranks[rank].same for rank in group.ranks))}"
