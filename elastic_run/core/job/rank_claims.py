"""Fixed ranks (`--node-rank` of the static backend): which ones have not come, and two nodes with one rank.

Two nodes with one rank are the user's mistake, or one of them is a node that came again.

A node that was started again may come before its former self is known to be lost. So a claim to a rank that another
node has counts only when both have lived for a lease. Until then no first round is formed.
"""

from __future__ import annotations

from elastic_run.core.job.ranks import list_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.state import Job, Node


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
