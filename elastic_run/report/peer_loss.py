"""The workers of this node that may be the cause when others have lost a peer, for the other nodes; and back.

Texts are cut before they are sent, because each node of the job reads them.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_groups import Place
from elastic_run.core.failure.diagnose import has_failed, is_stuck
from elastic_run.core.protocol.facts import MOST_STUCK, PeerLoss, StuckRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.failure.root_cause import WorkerEnd

#: Characters of a path, or of another text.
_LONGEST = 400


def describe_peer_loss(ends: Sequence[WorkerEnd]) -> PeerLoss | None:
    """Return what the job has to know of a node's workers; None if all of them obeyed the stop.

    Args:
        ends: How the workers of the node ended.
    """
    found = sorted(filter(is_stuck, ends), key=lambda end: not end.is_unmoved)
    stuck = [_name(end.rank, end.stuck_at) for end in found[:MOST_STUCK] if end.stuck_at is not None]
    failed = sum(map(has_failed, ends))
    unmoved = sum(end.is_unmoved for end in found)
    return PeerLoss(failed, len(found), tuple(stuck), unmoved) if stuck or failed else None


def read_places(stuck: Sequence[StuckRank]) -> dict[int, Place]:
    """Return the places of ranks that did not stop, by global rank."""
    return {each.rank: Place(each.function, each.file, each.line, problem=each.problem) for each in stuck}


def _name(rank: int, place: Place) -> StuckRank:
    return StuckRank(rank, place.function[:_LONGEST], place.file[-_LONGEST:], place.line, place.problem[:_LONGEST])
