"""Dumps to findings: which rank did not join which collective of which process group. Pure.

First each process group is examined alone, then the groups together: if a rank does not join because it waits in a
collective of another group, the cause is in that group. A finding is the cause if none of its ranks waits in another
group. If all findings wait for each other, the ranks call the groups in different orders: where most ranks of an
innermost group wait in it, the others are named; in a tie, the ranks of both sides.

Rules for one group
- All ranks of a group number its collectives alike, so a rank with a lower last number than its peers has not joined
  the next collective. Later findings follow from the first.
- A rank is unknown if it has no dump, or if its ring has overwritten all its collectives of the group. A rank without
  a dump is named only if every known rank has joined.
- Ranks have to call the same operation with the same sizes and types. In some operations sizes may differ, so they are
  not compared: `all_to_all`, the tensors of the root in `gather` and `scatter`, coalesced operations of several
  tensors.
"""

from __future__ import annotations

from elastic_run.diagnosis.dumps import COMPLETED, OPEN, STARTED, Collective
from elastic_run.diagnosis.trace_findings import (
    ALONE,
    BEHIND,
    DIFFERENT_CALLS,
    DIFFERENT_ORDER,
    KINDS,
    NO_DUMP,
    NO_PARTNER,
    NOT_JOINED,
    NOT_STARTED,
    UNFINISHED,
    WITHOUT_RANKS,
    Analysis,
    Finding,
)
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from elastic_run.diagnosis.dumps import Calls, Dump

#: Operations whose inputs have the same shape on all ranks; they fail or hang where element types differ, too.
_SAME_INPUTS = frozenset(
    (
        *("all_reduce", "allreduce_coalesced", "reduce", "_reduce_oop", "broadcast", "_broadcast_oop"),
        *("all_gather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    )
)


@dataclass(frozen=True, slots=True)
class Group:
    """The calls of a process group that one backend performs, as the dumps show them."""

    name: str
    description: str
    members: tuple[int, ...]  # Its ranks, as far as they are known
    calls: dict[int, dict[int, Calls]]  # The collectives of each rank that has a dump, by their number in the group
    is_listed: bool  # Whether a dump lists the members
    library: str = ""  # Name of the backend: a group may have one for each kind of device

    def make_finding(
        self, kind: str, operation: str, sequence: int, *, ranks: tuple[int, ...], waiting: tuple[int, ...], **more: Any
    ) -> Finding:
        """Return a finding in this group; `more` are further fields of it."""
        return Finding(kind, self.name, self.description, self.members, operation, sequence, ranks, waiting, **more)


def analyse(dumps: Sequence[Dump]) -> Analysis:
    """Find the reasons why a job does not go on."""
    by_rank = {dump.rank: dump for dump in dumps}
    groups = _find_groups(by_rank)
    found = [finding for group in groups for finding in _check_group(group, by_rank)]
    causes, consequences = _separate(found)
    if consequences and not any(KINDS.index(cause.kind) <= KINDS.index(NO_DUMP) for cause in causes):
        causes = [_find_different_order(sorted(consequences, key=_order)), *causes]
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
def _find_groups(dumps: Mapping[int, Dump]) -> list[Group]:
    """Return the process groups; two groups of one name are told apart by their lists of members and their backends."""
    # The ranks of the whole job, as far as they are known. gloo's dumps list the default group as "".
    lists = [members for dump in dumps.values() for members in dump.members.values()]
    world = tuple(sorted({*dumps, *(rank for members in lists for rank in members)}))
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


def _calls_by_number(dump: Dump, group: str, library: str) -> dict[int, Calls]:
    calls: dict[int, Calls] = {}
    for call in dump.collectives:
        if (call.group, call.library) == (group, library) and not call.is_p2p:
            calls[call.sequence] = (*calls.get(call.sequence, ()), call)
    return calls


# --- one group -----------------------------------------------------------------------------------------------------
def _check_group(group: Group, dumps: Mapping[int, Dump]) -> list[Finding]:
    """Return the first finding in the collectives of a group, as later ones follow from it; and those in its sends."""
    finding = None
    if any(group.calls.values()) and len(group.members) == 1:
        finding = _alone(group)
    elif any(group.calls.values()):
        finding = _different_calls(group, dumps) or _not_joined(group, dumps) or _unfinished(group)
    return [*([] if finding is None else [finding]), *_check_p2p(group, dumps)]


def _alone(group: Group) -> Finding | None:
    """Find a rank that waits in a group whose other members are unknown: gloo's own dumps don't list them."""
    ((rank, by_number),) = group.calls.items()
    number, calls = max(by_number.items())
    if group.is_listed or not _is_open(calls):
        return None
    return group.make_finding(ALONE, calls[-1].operation, number, ranks=(), waiting=(rank,), where=calls[-1].where)


def _different_calls(group: Group, dumps: Mapping[int, Dump]) -> Finding | None:
    for number in sorted({number for calls in group.calls.values() for number in calls}):
        calls = {rank: each[number] for rank, each in group.calls.items() if number in each}
        sets = _group_equal(calls)
        if len(sets) == 1:
            continue
        most, second = sets[0], sets[1]
        is_tie = len(most) == len(second)
        first = calls[most[0]]
        return group.make_finding(
            DIFFERENT_CALLS,
            first[-1].operation,
            number,
            ranks=tuple(sorted(calls)) if is_tie else tuple(sorted(rank for other in sets[1:] for rank in other)),
            waiting=() if is_tie else tuple(rank for rank in most if _waits(dumps[rank], calls[rank])),
            where=_common_place(calls[rank] for rank in most),
            difference=_difference(first, calls[second[0]]),
            calls=tuple((ranks, _differing(calls[ranks[0]], first)) for ranks in sets),
        )
    return None


def _group_equal(calls: dict[int, Calls]) -> list[tuple[int, ...]]:
    """Return the ranks with equal calls under one number, the largest group first."""
    groups: list[list[int]] = []
    for rank in sorted(calls):
        equal = next((group for group in groups if not _difference(calls[group[0]], calls[rank])), None)
        if equal is None:
            groups.append([rank])
        else:
            equal.append(rank)
    return [tuple(group) for group in sorted(groups, key=lambda group: (-len(group), group))]


def _difference(one: Calls, other: Calls) -> str:
    """Return how two ranks' calls under one number differ: `operation`, `sizes` or `types`; "" for not at all."""
    if [call.operation for call in one] != [call.operation for call in other]:
        return "operation"
    pairs = [pair for pair in zip(one, other, strict=True) if pair[0].operation in _SAME_INPUTS]
    if any(mine.input_sizes != theirs.input_sizes for mine, theirs in pairs):
        return "sizes"
    return "types" if any(set(mine.input_types) != set(theirs.input_types) for mine, theirs in pairs) else ""


def _differing(calls: Calls, other: Calls) -> Collective:
    """Return the first of several calls that differs from another rank's, or the last."""
    pairs = zip(calls, other, strict=False)
    return next((mine for mine, theirs in pairs if _difference((mine,), (theirs,))), calls[-1])


def _not_joined(group: Group, dumps: Mapping[int, Dump]) -> Finding | None:
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
    example = next((calls for calls in joined.values() if calls), ())
    ends = [(rank, dumps[rank].collectives[-1]) for rank in late if dumps[rank].collectives]
    return group.make_finding(
        NO_DUMP if not late else NOT_JOINED if waiting else BEHIND,
        example[-1].operation if example else "",
        number,
        ranks=missing,
        waiting=waiting,
        where=_common_place(calls for rank, calls in joined.items() if rank in waiting),
        last=tuple(ends),
        behind=tuple((rank, high - known[rank]) for rank in late),
    )


def _last_number(group: Group, dumps: Mapping[int, Dump], rank: int, first: int) -> int | None:
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
    return group.make_finding(
        NOT_STARTED if not_started else UNFINISHED,
        calls[waiting[0]][-1].operation,
        number,
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


def _check_p2p(group: Group, dumps: Mapping[int, Dump]) -> list[Finding]:
    """Find the sends and recvs of a group whose partner has no open call that matches.

    Only open calls are compared: the number of ended calls that a ring still holds differs from rank to rank. A recv
    from any rank is no finding, and may take any send to its rank.
    """
    pending: dict[tuple[int, int, str], list[tuple[int, Collective]]] = {}
    for rank in group.calls:
        for call in dumps[rank].collectives:
            if (call.group, call.library) == (group.name, group.library) and call.is_p2p and call.is_open:
                pending.setdefault((call.source, call.target, call.operation), []).append((rank, call))
    from_any = {target for source, target, _ in pending if source < 0}
    findings = []
    for (source, target, operation), calls in sorted(pending.items()):
        opposite = pending.get((source, target, "recv" if operation == "send" else "send"), [])
        if len(calls) > len(opposite) and target not in from_any:
            partner = target if operation == "send" else source
            findings.append(_without_partner(group, calls[len(opposite)], partner, dumps))
    return findings


def _without_partner(group: Group, waiting: tuple[int, Collective], partner: int, dumps: Mapping[int, Dump]) -> Finding:
    rank, call = waiting
    # The partner's number counts within the group.
    other = group.members[partner] if partner < len(group.members) else partner
    last = dumps[other].collectives[-1:] if other in dumps else ()
    return group.make_finding(
        NO_PARTNER if other in dumps else NO_DUMP,
        call.operation,
        call.sequence,
        ranks=(other,),
        waiting=(rank,),
        where=call.where,
        last=tuple((other, each) for each in last),
    )


# --- all groups ----------------------------------------------------------------------------------------------------
def _separate(found: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Separate the causes from their consequences: ranks that wait in another group are no cause."""
    causes, consequences = [], []
    for finding in found:
        waiting = {rank for other in found if other is not finding for rank in other.waiting}
        own = tuple(rank for rank in finding.ranks if rank not in waiting)
        if finding.kind == DIFFERENT_CALLS:
            causes.append(finding)
        elif finding.kind in WITHOUT_RANKS or own:
            last = tuple(each for each in finding.last if each[0] in own)
            behind = tuple(each for each in finding.behind if each[0] in own)
            causes.append(replace(finding, ranks=own, last=last, behind=behind))
        else:
            consequences.append(finding)
    return causes, consequences


def _find_different_order(findings: Sequence[Finding]) -> Finding:
    """Return that ranks wait for each other in different groups."""
    waits = tuple((finding.waiting, _call_of(finding)) for finding in findings)
    smallest = min(len(finding.members) for finding in findings)
    inner = [finding for finding in findings if len(finding.members) == smallest]
    for finding in inner:
        if len(finding.ranks) < len(finding.waiting):
            return replace(finding, kind=DIFFERENT_ORDER, calls=waits)
    ranks = tuple(sorted({rank for finding in inner for rank in (*finding.ranks, *finding.waiting)}))
    return replace(inner[0], kind=DIFFERENT_ORDER, ranks=ranks, waiting=(), calls=waits, last=(), behind=())


def _call_of(finding: Finding) -> Collective:
    return Collective(
        record=0,
        group=finding.group,
        description=finding.description,
        sequence=finding.sequence,
        operation=finding.operation,
        state=OPEN,
        where=finding.where,
    )
