"""Dumps to findings: which rank did not join which collective of which process group.

Pure. First each process group is judged alone: all ranks of a group number its collectives alike, so a rank with a
lower last number than its peers has not joined the next collective. Then the groups are judged together: if a rank does
not join because it waits in a collective of another group, the cause is in that group. A finding is the cause if none
of its ranks waits in another group; if all findings wait for each other, the ranks call the groups in different orders.

A rank is unknown if it has no dump, or if its ring has overwritten all its collectives of the group. A rank without a
dump is named only if every known rank has joined.
"""

from __future__ import annotations

from elastic_run.diagnosis.collectives import COMPLETED, STARTED
from elastic_run.diagnosis.group_order import find_different_order
from elastic_run.diagnosis.operation_match import difference, group_equal
from elastic_run.diagnosis.other_sizes import find_other_sizes
from elastic_run.diagnosis.trace_findings import (
    ALONE,
    BEHIND,
    DIFFERENT_CALLS,
    KINDS,
    NO_DUMP,
    NOT_JOINED,
    NOT_STARTED,
    OTHER_SIZE,
    UNFINISHED,
    WITHOUT_RANKS,
    Analysis,
    Finding,
    Group,
)
from elastic_run.diagnosis.unmatched_p2p import unmatched_p2p
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from elastic_run.diagnosis.collectives import Collective, Dump
    from elastic_run.diagnosis.operation_match import Calls


def analyse(dumps: Sequence[Dump], aborted: Collection[int] = ()) -> Analysis:
    """Find the reasons why a job does not go on.

    Args:
        dumps: At most one of each rank, of any of the job's ranks.
        aborted: Ranks that gloo ended because they got more bytes than their collective takes; they leave no dump.

    Returns:
        The findings.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups = _find_groups(by_rank)
    found = [finding for group in groups for finding in _judge(group, by_rank)]
    found += [finding for group in groups for finding in unmatched_p2p(group, by_rank)]
    found += find_other_sizes(groups, by_rank, aborted, found)
    causes, consequences = _separate(found)
    if consequences and not any(KINDS.index(cause.kind) <= KINDS.index(NO_DUMP) for cause in causes):
        causes = [find_different_order(sorted(consequences, key=_order), groups, by_rank), *causes]
        consequences = []
    members = {rank for group in groups for rank in group.members}
    return Analysis(
        findings=tuple(sorted(causes, key=_order)),
        consequences=tuple(sorted(consequences, key=_order)),
        ranks=tuple(sorted(by_rank)),
        absent=tuple(sorted(members - set(by_rank))),
    )


def _order(finding: Finding) -> tuple[int, int, int, str]:
    return (KINDS.index(finding.kind), len(finding.members), finding.sequence, finding.group)


# --- process groups ------------------------------------------------------------------------------------------------
def _find_groups(dumps: dict[int, Dump]) -> list[Group]:
    """Return the process groups; two groups of one name are told apart by their lists of members and their backends."""
    world = _find_world(dumps)
    ranks: dict[tuple[str, tuple[int, ...], str], set[int]] = {}
    descriptions: dict[tuple[str, tuple[int, ...]], str] = {}
    libraries: dict[str, set[str]] = {}
    for call in (call for dump in dumps.values() for call in dump.collectives):
        libraries.setdefault(call.group, set()).add(call.library)
    for rank, dump in dumps.items():
        used = {call.group: call.description for call in dump.collectives}
        for name in {**dict.fromkeys(dump.members), **used}:
            description = used.get(name, "")
            known = dump.members.get(name) or (world if description == "default_pg" else ())
            for library in libraries.get(name, {""}):
                present = ranks.setdefault((name, known, library), set())
                if not known or rank in known:
                    present.add(rank)
            descriptions[name, known] = description or descriptions.get((name, known), "")
    return [
        Group(
            name=name,
            description=descriptions[name, known],
            members=tuple(sorted(known or present)),
            calls={rank: _calls_by_number(dumps[rank], name, library) for rank in sorted(present)},
            is_listed=bool(known),
            library=library,
        )
        for (name, known, library), present in ranks.items()
        if name or any(call.group == name for rank in present for call in dumps[rank].collectives)
    ]


def _find_world(dumps: dict[int, Dump]) -> tuple[int, ...]:
    """Return the ranks of the whole job, as far as they are known. gloo's dumps list the default group as ``."""
    lists = [members for dump in dumps.values() for members in dump.members.values()]
    return tuple(sorted({*dumps, *(rank for members in lists for rank in members)}))


def _calls_by_number(dump: Dump, group: str, library: str) -> dict[int, Calls]:
    calls: dict[int, Calls] = {}
    for call in dump.collectives:
        if (call.group, call.library) == (group, library) and not call.is_p2p:
            calls[call.sequence] = (*calls.get(call.sequence, ()), call)
    return calls


# --- one group -----------------------------------------------------------------------------------------------------
def _judge(group: Group, dumps: dict[int, Dump]) -> list[Finding]:
    """Return the first finding in a group; later ones follow from it."""
    if not any(group.calls.values()):
        return []
    if len(group.members) == 1:
        return _alone(group)
    finding = _different_calls(group, dumps) or _not_joined(group, dumps) or _unfinished(group)
    return [] if finding is None else [finding]


def _alone(group: Group) -> list[Finding]:
    """Find a rank that waits in a group whose other members are unknown: gloo's own dumps don't list them."""
    ((rank, by_number),) = group.calls.items()
    number, calls = max(by_number.items())
    if group.is_listed or not _is_open(calls):
        return []
    return [
        Finding(
            kind=ALONE,
            group=group.name,
            description=group.description,
            members=group.members,
            operation=calls[-1].operation,
            sequence=number,
            ranks=(),
            waiting=(rank,),
            where=calls[-1].where,
        )
    ]


def _different_calls(group: Group, dumps: dict[int, Dump]) -> Finding | None:
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    for number in numbers:
        calls = {rank: each[number] for rank, each in group.calls.items() if number in each}
        sets = group_equal(calls)
        if len(sets) < 2:  # noqa: PLR2004 - all are equal
            continue
        most, second = sets[0], sets[1]
        is_tie = len(most) == len(second)
        first = calls[most[0]]
        return Finding(
            kind=DIFFERENT_CALLS,
            group=group.name,
            description=group.description,
            members=group.members,
            operation=first[-1].operation,
            sequence=number,
            ranks=tuple(sorted(calls)) if is_tie else tuple(sorted(rank for other in sets[1:] for rank in other)),
            waiting=() if is_tie else tuple(rank for rank in most if _waits(dumps[rank], calls[rank])),
            where=_common_place(calls[rank] for rank in most),
            difference=difference(first, calls[second[0]]),
            calls=tuple((ranks, _differing(calls[ranks[0]], first)) for ranks in sets),
        )
    return None


def _differing(calls: Calls, other: Calls) -> Collective:
    """Return the first of several calls that differs from another rank's, or the last."""
    pairs = zip(calls, other, strict=False)
    return next((mine for mine, theirs in pairs if difference((mine,), (theirs,))), calls[-1])


def _not_joined(group: Group, dumps: dict[int, Dump]) -> Finding | None:
    first = min(number for calls in group.calls.values() for number in calls)
    last = {rank: _last_number(group, dumps, rank, first) for rank in group.members}
    known = {rank: number for rank, number in last.items() if number is not None}
    low, high = min(known.values()), max(known.values())
    number = min((each for calls in group.calls.values() for each in calls if each > low), default=low)
    late = tuple(rank for rank, each in sorted(known.items()) if each < number)
    joined = {rank: group.calls[rank].get(number, ()) for rank in known if rank not in late}
    waiting = tuple(rank for rank, calls in sorted(joined.items()) if calls and _waits(dumps[rank], calls))
    missing = late or tuple(rank for rank in group.members if rank not in dumps)
    if not missing or (not late and not any(_is_open(calls) for calls in joined.values())):
        return None
    kind = NO_DUMP if not late else NOT_JOINED if waiting else BEHIND
    example = next((calls for calls in joined.values() if calls), ())
    ends = [(rank, dumps[rank].collectives[-1]) for rank in late if dumps[rank].collectives]
    return Finding(
        kind=kind,
        group=group.name,
        description=group.description,
        members=group.members,
        operation=example[-1].operation if example else "",
        sequence=number,
        ranks=missing,
        waiting=waiting,
        where=_common_place(calls for rank, calls in joined.items() if rank in waiting),
        last=tuple(ends),
        behind=tuple((rank, high - known[rank]) for rank in late),
    )


def _last_number(group: Group, dumps: dict[int, Dump], rank: int, first: int) -> int | None:
    """Return the number of a rank's last collective in a group, or None where it is unknown."""
    if group.calls.get(rank):
        return max(group.calls[rank])
    return first - 1 if rank in dumps and dumps[rank].is_whole else None


def _unfinished(group: Group) -> Finding | None:
    """Return a collective that all ranks have joined and that some have not ended."""
    number = max(number for calls in group.calls.values() for number in calls)
    calls = {rank: each[number] for rank, each in group.calls.items() if number in each}
    waiting = tuple(rank for rank, each in calls.items() if _is_open(each))
    if not waiting or len(calls) < len(group.members):
        return None
    started = {rank for rank, each in calls.items() if any(call.state == STARTED for call in each)}
    not_started = tuple(rank for rank in waiting if rank not in started) if started else ()
    return Finding(
        kind=NOT_STARTED if not_started else UNFINISHED,
        group=group.name,
        description=group.description,
        members=group.members,
        operation=calls[waiting[0]][-1].operation,
        sequence=number,
        ranks=not_started,
        waiting=tuple(rank for rank in waiting if rank not in not_started),
        where=_common_place(calls[rank] for rank in waiting),
    )


def _is_open(calls: Calls) -> bool:
    return any(call.is_open for call in calls)


def _waits(dump: Dump, calls: Calls) -> bool:
    """Whether a rank waits in calls, or waited until they failed: its last record, not known as a success."""
    is_last = bool(calls) and calls[-1] is dump.collectives[-1]
    return _is_open(calls) or (is_last and calls[-1].state != COMPLETED)


def _common_place(calls: Iterable[Calls]) -> str:
    """Return the place in the code that most of these calls have, or ""."""
    places = [call[-1].where for call in calls if call[-1].where]
    return max(places, key=places.count, default="")


# --- all groups ----------------------------------------------------------------------------------------------------
def _separate(found: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Separate the causes from their consequences: ranks that wait in another group are no cause."""
    causes, consequences = [], []
    for finding in found:
        waiting = {rank for other in found if other is not finding for rank in other.waiting}
        own = tuple(rank for rank in finding.ranks if rank not in waiting)
        if finding.kind in (DIFFERENT_CALLS, OTHER_SIZE, *WITHOUT_RANKS) or own:
            causes.append(finding if finding.kind in (DIFFERENT_CALLS, OTHER_SIZE) else _keep_ranks(finding, own))
        else:
            consequences.append(finding)
    return causes, consequences


def _keep_ranks(finding: Finding, ranks: tuple[int, ...]) -> Finding:
    return replace(
        finding,
        ranks=ranks,
        last=tuple(each for each in finding.last if each[0] in ranks),
        behind=tuple(each for each in finding.behind if each[0] in ranks),
    )
