"""Which node gets which rank.

Group ranks: a survivor keeps its rank where the round still has it, so that a replacement takes exactly the place that
became free. Then a node that prefers a free rank gets it (`--node-rank`), then the lowest free ranks go out by
location, so that nodes of one switch are neighbours, and in order of joining.
Worker ranks: global and role ranks count up in the order of group ranks, as torch's agent does
(`SimpleElasticAgent._assign_worker_ranks`), for any number of workers per node.
Fixed ranks (`--node-rank` of the static backend): two nodes with one rank are the user's mistake, or one of them was
started again and came before its former self is known to be lost. So a claim to a rank that another node has counts
only when both have lived for a lease. Until then no first round is formed.
"""

from __future__ import annotations

from collections import Counter

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.state import Job, Node

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
    """Return the rank of each node, in order of rank; the candidates come in order of joining."""
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


# --- fixed ranks ------------------------------------------------------------------------------------------------------
def has_rival(nodes: Iterable[Node], node: Node) -> bool:
    """Whether a node that came before has the fixed rank of another."""
    return _find_rival(nodes, node) is not None


def find_disputes(job: Job) -> list[tuple[Node, Node]]:
    """Return the nodes that claim a fixed rank, each with the node that has it; both are there."""
    claimants = [job.nodes[name] for name in job.rank_claims if name in job.nodes]
    pairs = [(node, _find_rival(job.nodes.values(), node)) for node in claimants]
    return [(node, rival) for node, rival in pairs if rival is not None]


def counts_at(node: Node, config: JobConfig) -> float:
    """Return when a claim counts: a rival that is dead would have been found silent before."""
    return node.arrived_at + config.lease + config.keep_alive_interval


def describe_dispute(node: Node, rival: Node) -> str:
    """Say which nodes have one rank, in a clause for the user."""
    both = " and ".join(f"{one.node_info.host} (pid {one.node_info.pid})" for one in (rival, node))
    return f"--node-rank={node.node_info.preferred_rank} was given to two nodes: {both}"


def describe_missing_ranks(job: Job, config: JobConfig) -> str:
    """Return a clause with the ranks of nodes that have not come; "" if none is missing, or if ranks are not fixed."""
    fixed = {node.node_info.preferred_rank for node in job.nodes.values() if node.node_info.has_fixed_rank}
    missing = [rank for rank in range(config.max_nodes) if rank not in fixed]
    if not fixed or not missing:
        return ""
    return f"missing: node rank{'s' if len(missing) > 1 else ''} {list_ranks(missing)}"


def _find_rival(nodes: Iterable[Node], node: Node) -> Node | None:
    node_info = node.node_info
    if not node_info.has_fixed_rank:
        return None
    return next(
        (
            other
            for other in nodes
            if other.node_info.has_fixed_rank
            and other.node_info.preferred_rank == node_info.preferred_rank
            and other.arrived < node.arrived
        ),
        None,
    )
