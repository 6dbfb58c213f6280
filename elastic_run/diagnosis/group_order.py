"""Ranks that wait for each other in different groups: which of them has left the order of the others. Pure.

Rules
- Where most ranks of an innermost group wait in it, the others are named.
- In a tie, as in a group of two, the ranks of equal groups decide. Equal groups have the same description and size, and
  each rank is in one of them (its tensor-parallel group, for example). Each rank has a count: how many
  collectives of its own group it called before the outer collective. If all ranks outside of the tie have the same
  count, and the dumps hold all their calls, a rank of the tie with another count is named.
- Elsewhere the ranks of both sides of the tie are named.
"""

from __future__ import annotations

from elastic_run.diagnosis.collectives import OPEN, Collective
from elastic_run.diagnosis.trace_findings import DIFFERENT_ORDER, Finding
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.diagnosis.collectives import Dump
    from elastic_run.diagnosis.trace_findings import Group

__all__ = ["find_different_order"]

#: Ranks of equal groups that have to agree.
_WITNESSES = 2


def find_different_order(findings: Sequence[Finding], groups: Sequence[Group], dumps: Mapping[int, Dump]) -> Finding:
    """Return that ranks wait for each other in different groups.

    Args:
        findings: What each group waits for, the likeliest cause first.
        groups: All groups.
        dumps: The dumps by rank.
    """
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
