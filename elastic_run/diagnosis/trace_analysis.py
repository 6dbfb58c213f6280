"""Dumps to findings: which rank did not join which collective of which process group.

Pure. First each process group is examined alone (`trace_group`), then the groups together: if a rank does not join
because it waits in a collective of another group, the cause is in that group. A finding is the cause if none of its
ranks waits in another group; if all findings wait for each other, the ranks call the groups in different orders.

Rules for ranks that wait for each other in different groups
- Where most ranks of an innermost group wait in it, the others are named.
- In a tie, as in a group of two, the ranks of equal groups decide. Equal groups have the same description and size, and
  each rank is in one of them (its tensor-parallel group, for example). Each rank has a count: how many
  collectives of its own group it called before the outer collective. If all ranks outside of the tie have the same
  count, and the dumps hold all their calls, a rank of the tie with another count is named.
- Elsewhere the ranks of both sides of the tie are named.

A rank that gloo has ended because a peer sent more bytes than its collective takes leaves no dump. Its peers in the
innermost group that wait, or have failed, in their last call are named with that call and its sizes, beside the rank
itself: either side may have the wrong size. Where the dumps show different calls in that group, these say more.
"""

from __future__ import annotations

from elastic_run.diagnosis.dumps import COMPLETED, OPEN, Collective
from elastic_run.diagnosis.trace_findings import (
    DIFFERENT_CALLS,
    DIFFERENT_ORDER,
    KINDS,
    NO_DUMP,
    OTHER_SIZE,
    WITHOUT_RANKS,
    Analysis,
    Finding,
    Group,
)
from elastic_run.diagnosis.trace_group import check_group
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from elastic_run.diagnosis.dumps import Calls, Dump


#: Ranks of equal groups that have to agree.
_WITNESSES = 2


def analyse(dumps: Sequence[Dump], aborted: Collection[int] = ()) -> Analysis:
    """Find the reasons why a job does not go on; `aborted` are ranks that gloo ended for data of another size."""
    by_rank = {dump.rank: dump for dump in dumps}
    groups = _find_groups(by_rank)
    found = [finding for group in groups for finding in check_group(group, by_rank)]
    found += _find_other_sizes(groups, by_rank, aborted, found)
    causes, consequences = _separate(found)
    if consequences and not any(KINDS.index(cause.kind) <= KINDS.index(NO_DUMP) for cause in causes):
        causes = [_find_different_order(sorted(consequences, key=_order), groups, by_rank), *causes]
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


def _find_world(dumps: Mapping[int, Dump]) -> tuple[int, ...]:
    """Return the ranks of the whole job, as far as they are known. gloo's dumps list the default group as ``."""
    lists = [members for dump in dumps.values() for members in dump.members.values()]
    return tuple(sorted({*dumps, *(rank for members in lists for rank in members)}))


def _calls_by_number(dump: Dump, group: str, library: str) -> dict[int, Calls]:
    calls: dict[int, Calls] = {}
    for call in dump.collectives:
        if (call.group, call.library) == (group, library) and not call.is_p2p:
            calls[call.sequence] = (*calls.get(call.sequence, ()), call)
    return calls


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


def _find_different_order(findings: Sequence[Finding], groups: Sequence[Group], dumps: Mapping[int, Dump]) -> Finding:
    """Return that ranks wait for each other in different groups."""
    waits = tuple((finding.waiting, _call_of(finding)) for finding in findings)
    smallest = min(len(finding.members) for finding in findings)
    inner = [finding for finding in findings if len(finding.members) == smallest]
    for finding in inner:
        if len(finding.ranks) < len(finding.waiting):
            return replace(finding, kind=DIFFERENT_ORDER, calls=waits)
    for finding in inner:
        for outer in findings:
            if set(finding.ranks) <= set(outer.waiting) and (odd := _find_odd(finding, outer, groups, dumps)):
                return replace(odd, kind=DIFFERENT_ORDER, calls=waits)
    ranks = tuple(sorted({rank for finding in inner for rank in (*finding.ranks, *finding.waiting)}))
    return replace(inner[0], kind=DIFFERENT_ORDER, ranks=ranks, waiting=(), calls=waits, last=(), behind=())


def _find_odd(inner: Finding, outer: Finding, groups: Sequence[Group], dumps: Mapping[int, Dump]) -> Finding | None:
    """Return the finding whose ranks have left the order of the ranks of equal groups, or None."""
    equal = [
        group
        for group in groups
        if (group.description, len(group.members)) == (inner.description, len(inner.members))
        and group.name != outer.group
    ]
    counts: dict[int, int] = {}
    for rank in outer.members:
        own = [group for group in equal if rank in group.members]
        at = _find_record(rank, outer, dumps)
        if len(own) == 1 and at is not None:
            calls = [call for number in own[0].calls.get(rank, {}).values() for call in number if call.record < at]
            counts[rank] = len(calls)
    usual = {number for rank, number in counts.items() if rank not in inner.members}
    witnesses = [rank for rank in counts if rank not in inner.members]
    if len(witnesses) < _WITNESSES or len(usual) != 1 or not set(inner.ranks) <= counts.keys():
        return None
    return outer if {counts[rank] for rank in inner.ranks} == usual else inner


def _find_record(rank: int, outer: Finding, dumps: Mapping[int, Dump]) -> int | None:
    """Return the entry of a rank's call of the outer collective; None where it, or what was before it, is unknown."""
    dump = dumps.get(rank)
    if dump is None or not dump.is_whole:
        return None
    key = (outer.group, outer.sequence, outer.operation)
    is_outer = [call for call in dump.collectives if (call.group, call.sequence, call.operation) == key]
    return is_outer[0].record if is_outer else None


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


def _find_other_sizes(
    groups: Sequence[Group], dumps: Mapping[int, Dump], aborted: Collection[int], found: Sequence[Finding]
) -> list[Finding]:
    """Find the peers of ranks that got data of another size."""
    if any(finding.kind == DIFFERENT_CALLS for finding in found):
        return []
    return [finding for rank in sorted(aborted) if rank not in dumps for finding in _find_peers(rank, groups, dumps)]


def _find_peers(rank: int, groups: Sequence[Group], dumps: Mapping[int, Dump]) -> Iterator[Finding]:
    for group in sorted(groups, key=lambda group: len(group.members)):
        last = {
            peer: dumps[peer].collectives[-1] for peer in group.members if peer in dumps and dumps[peer].collectives
        }
        peers = {peer: call for peer, call in last.items() if _may_fail(call, group)}
        if rank in group.members and peers:
            call = next(iter(peers.values()))
            yield group.make_finding(
                OTHER_SIZE,
                call.operation,
                call.sequence,
                ranks=tuple(sorted((rank, *peers))),
                waiting=tuple(peers),
                where=call.where,
                difference="sizes",
                calls=((tuple(peers), call),),
            )
            return


def _may_fail(call: Collective, group: Group) -> bool:
    return group.has(call) and call.state != COMPLETED and not call.is_p2p
