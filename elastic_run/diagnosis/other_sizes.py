"""Ranks that gloo has ended because a peer sent more bytes than their collective takes. Pure.

Such a rank leaves no dump, so what it called is unknown. Its peers in the innermost group that wait, or have failed, in
their last call are told with that call and its sizes, beside the rank itself: either side may have the wrong size.
Where the dumps show different calls in that group, these say more.
"""

from __future__ import annotations

from elastic_run.diagnosis.collectives import COMPLETED
from elastic_run.diagnosis.trace_findings import DIFFERENT_CALLS, OTHER_SIZE, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from elastic_run.diagnosis.collectives import Collective, Dump
    from elastic_run.diagnosis.trace_findings import Group

__all__ = ["find_other_sizes"]


def find_other_sizes(
    groups: Sequence[Group], dumps: Mapping[int, Dump], aborted: Collection[int], found: Sequence[Finding]
) -> list[Finding]:
    """Find the peers of ranks that got data of another size.

    Args:
        groups: The process groups.
        dumps: The dumps by rank.
        aborted: Those ranks.
        found: What else was found.
    """
    if any(finding.kind == DIFFERENT_CALLS for finding in found):
        return []
    return [finding for rank in sorted(aborted) if rank not in dumps for finding in _find(rank, groups, dumps)]


def _find(rank: int, groups: Sequence[Group], dumps: Mapping[int, Dump]) -> Iterator[Finding]:
    for group in sorted(groups, key=lambda group: len(group.members)):
        last = {
            peer: dumps[peer].collectives[-1] for peer in group.members if peer in dumps and dumps[peer].collectives
        }
        peers = {peer: call for peer, call in last.items() if _may_fail(call, group)}
        if rank in group.members and peers:
            call = next(iter(peers.values()))
            yield Finding(
                kind=OTHER_SIZE,
                group=group.name,
                description=group.description,
                members=group.members,
                operation=call.operation,
                sequence=call.sequence,
                ranks=tuple(sorted((rank, *peers))),
                waiting=tuple(peers),
                where=call.where,
                difference="sizes",
                calls=((tuple(peers), call),),
            )
            return


def _may_fail(call: Collective, group: Group) -> bool:
    return group.has(call) and call.state != COMPLETED and not call.is_p2p
