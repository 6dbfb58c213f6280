"""Whether the ranks of a group call the same operation with the same sizes and types.

Pure. In some operations sizes may differ, so they are not compared: `all_to_all`, the tensors of the root in `gather`
and `scatter`, coalesced operations of several tensors.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.collectives import Collective

    #: The calls of one rank under one number: several where they were coalesced.
    Calls = tuple[Collective, ...]

#: Operations whose inputs have the same shape on all ranks.
_SAME_INPUTS = frozenset(
    (
        *("all_reduce", "allreduce_coalesced", "reduce", "_reduce_oop", "broadcast", "_broadcast_oop"),
        *("all_gather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    )
)
#: Operations that fail or hang where element types differ.
_SAME_TYPES = _SAME_INPUTS

#: Kinds of differences.
OPERATION = "operation"
SIZES = "sizes"
TYPES = "types"


def difference(one: Calls, other: Calls) -> str:
    """Return how the calls of two ranks under one number differ.

    Args:
        one: The calls of one rank.
        other: The calls of the other rank.

    Returns:
        `OPERATION`, `SIZES` or `TYPES`, or "" if they match.
    """
    if [call.operation for call in one] != [call.operation for call in other]:
        return OPERATION
    for mine, theirs in zip(one, other, strict=True):
        if mine.operation in _SAME_INPUTS and mine.input_sizes != theirs.input_sizes:
            return SIZES
    for mine, theirs in zip(one, other, strict=True):
        if mine.operation in _SAME_TYPES and set(mine.input_types) != set(theirs.input_types):
            return TYPES
    return ""


def group_equal(calls: dict[int, Calls]) -> list[tuple[int, ...]]:
    """Group ranks by equal calls.

    Args:
        calls: The calls of each rank under one number.

    Returns:
        Ranks with equal calls, the largest group first.
    """
    groups: list[list[int]] = []
    for rank in sorted(calls):
        equal = next((group for group in groups if not difference(calls[group[0]], calls[rank])), None)
        if equal is None:
            groups.append([rank])
        else:
            equal.append(rank)
    return [tuple(group) for group in sorted(groups, key=lambda group: (-len(group), group))]
