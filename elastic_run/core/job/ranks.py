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

from elastic_run.core.job.short_lists import list_ranks
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.state import Job, Node


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """Ranks of a node's first worker; those of the others follow."""

    base_rank: int  # Among all workers
    role_rank: int  # Among the workers of its role
    role_world_size: int  # The number of workers of its role


def assign_group_ranks(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the group rank of each node of the next round, in order of rank; the nodes come in order of joining."""
    taken: dict[int, str] = {}
    left = _take(taken, ((node, node.rank) for node in nodes), len(nodes))
    left = _take(taken, ((node, node.node_info.preferred_rank) for node in left), len(nodes))
    free = [rank for rank in range(len(nodes)) if rank not in taken]
    for rank, node in zip(free, sorted(left, key=lambda one: one.node_info.location), strict=True):
        taken[rank] = node.node
    return {taken[rank]: rank for rank in range(len(nodes))}


def _take(taken: dict[int, str], wishes: Iterable[tuple[Node, int | None]], size: int) -> list[Node]:
    """Give each node its preferred rank if that is free, in order of arrival; return the nodes without a rank."""
    left = []
    for node, rank in wishes:
        if rank is not None and 0 <= rank < size and rank not in taken:
            taken[rank] = node.node
        else:
            left.append(node)
    return left


def assign_worker_ranks(sizes: Sequence[tuple[str, int]]) -> tuple[WorkerRanks, ...]:
    """Return the ranks of each node's first worker, from each node's role and number of workers by group rank."""
    totals: Counter[str] = Counter()
    for role, size in sizes:
        totals[role] += size
    base, used, found = 0, Counter[str](), []
    for role, size in sizes:
        found.append(WorkerRanks(base_rank=base, role_rank=used[role], role_world_size=totals[role]))
        base += size
        used[role] += size
    return tuple(found)


# --- fixed ranks ------------------------------------------------------------------------------------------------------
def find_disputes(job: Job) -> list[tuple[Node, Node]]:
    """Return pairs of nodes that were given the same fixed rank: the later node, then the node that came first."""
    fixed = [node for node in job.nodes.values() if node.node_info.has_fixed_rank]
    holders: dict[int | None, Node] = {}
    found = []
    for node in sorted(fixed, key=lambda one: one.arrived):
        holder = holders.setdefault(node.node_info.preferred_rank, node)
        if holder is not node:
            found.append((node, holder))
    return found


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
