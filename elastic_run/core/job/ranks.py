"""Which node gets which rank.

Group ranks: a survivor keeps its rank where the round still has it, so that a replacement takes exactly the place that
became free. Then a node that prefers a free rank gets it (`--node-rank`), then the lowest free ranks go out by
location, so that nodes of one switch are neighbours, and in order of joining.
Worker ranks: global and role ranks count up in the order of group ranks, as torch's agent does
(`SimpleElasticAgent._assign_worker_ranks`), for any number of workers per node.
"""

from __future__ import annotations

from collections import Counter

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Runs of ranks that are listed.
_MOST_RUNS = 6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is in the next round.

    Args:
        node: Its id.
        rank: Its group rank in the last round, or None.
        preferred: The group rank that its user asked for, or None.
        location: Its place in the network, "" if not known; near nodes have texts that sort side by side.
    """

    node: str
    rank: int | None = None
    preferred: int | None = None
    location: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """Ranks of a node's first worker; those of the others follow.

    Args:
        base_rank: Among all workers.
        role_rank: Among the workers of its role.
        role_world_size: The number of workers of its role.
    """

    base_rank: int
    role_rank: int
    role_world_size: int


def assign_group_ranks(candidates: Sequence[Candidate]) -> dict[str, int]:
    """Give each node a rank from 0 to their number.

    Args:
        candidates: The nodes, in order of joining.

    Returns:
        Node to group rank, in order of rank.
    """
    taken: dict[int, str] = {}
    left = _take(taken, ((candidate, candidate.rank) for candidate in candidates), len(candidates))
    left = _take(taken, ((candidate, candidate.preferred) for candidate in left), len(candidates))
    free = (rank for rank in range(len(candidates)) if rank not in taken)
    placed = dict(zip(list(free), sorted(left, key=lambda candidate: candidate.location), strict=True))
    taken.update({rank: candidate.node for rank, candidate in placed.items()})
    return {taken[rank]: rank for rank in range(len(candidates))}


def assign_worker_ranks(sizes: Sequence[tuple[str, int]]) -> tuple[WorkerRanks, ...]:
    """Number the workers of a round.

    Args:
        sizes: Role and number of workers of each node, in order of group rank.

    Returns:
        The ranks of each node's first worker, in the same order.
    """
    totals: Counter[str] = Counter()
    for role, size in sizes:
        totals[role] += size
    base, used, found = 0, Counter[str](), []
    for role, size in sizes:
        found.append(WorkerRanks(base_rank=base, role_rank=used[role], role_world_size=totals[role]))
        base += size
        used[role] += size
    return tuple(found)


def _take(taken: dict[int, str], wishes: Iterable[tuple[Candidate, int | None]], size: int) -> list[Candidate]:
    """Give each node its preferred rank if that is free, in order of arrival; return the nodes without a rank."""
    left = []
    for candidate, rank in wishes:
        if rank is not None and 0 <= rank < size and rank not in taken:
            taken[rank] = candidate.node
        else:
            left.append(candidate)
    return left


def list_ranks(ordered: Sequence[int]) -> str:
    """Return ascending ranks with consecutive ranks as ranges, such as `0-2, 4` or `0, 2, 4, ... (50 in all)`."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > _MOST_RUNS:
        parts[_MOST_RUNS - 1 :] = [f"... ({len(ordered)} in all)"]
    return ", ".join(parts)
