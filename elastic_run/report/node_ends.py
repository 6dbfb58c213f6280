"""How the workers of this node ended, as far as the other nodes have to know; and back.

Texts are cut before they are sent, because each node of the job reads them.
"""

from __future__ import annotations

from collections import Counter

from elastic_run.core.diagnosis.stacks import Place
from elastic_run.core.failure.diagnose import has_failed, is_stuck
from elastic_run.core.failure.root_cause import compute_error_number
from elastic_run.core.protocol.facts import MOST_ERRORS, MOST_STUCK, ErrorCount, NodeEnds, StuckRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.failure.root_cause import WorkerEnd

#: Characters of a path, or of another text.
_LONGEST = 400


def describe_ends(ends: Sequence[WorkerEnd]) -> NodeEnds | None:
    """Return what the job has to know of a node's workers; None if all of them obeyed the stop.

    Args:
        ends: How the workers of the node ended.
    """
    found = sorted(filter(is_stuck, ends), key=lambda end: not end.is_unmoved)
    stuck = [_name(end.rank, end.stuck_at) for end in found[:MOST_STUCK] if end.stuck_at is not None]
    failed = sum(map(has_failed, ends))
    unmoved = sum(end.is_unmoved for end in found)
    numbers = Counter(number for number in map(compute_error_number, ends) if number is not None)
    errors = tuple(ErrorCount(*each) for each in numbers.most_common(MOST_ERRORS))
    is_worth_telling = stuck or failed or errors
    return NodeEnds(failed, len(found), tuple(stuck), unmoved, errors) if is_worth_telling else None


def read_places(stuck: Sequence[StuckRank]) -> dict[int, Place]:
    """Return the places of ranks that did not stop, by global rank."""
    return {each.rank: Place(each.function, each.file, each.line, problem=each.problem) for each in stuck}


def _name(rank: int, place: Place) -> StuckRank:
    return StuckRank(rank, place.function[:_LONGEST], place.file[-_LONGEST:], place.line, place.problem[:_LONGEST])
