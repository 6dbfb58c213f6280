"""Forms a round: the ranks of its members, and the assignment that each of them gets. Pure.

Tensors and collectives of two versions of torch may not fit together, so the assignment also says whether the members
have different versions.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.host_lists import fold_hosts, list_hosts
from elastic_run.core.job.node_events import Assignment
from elastic_run.core.job.ranks import Candidate, assign_group_ranks, assign_worker_ranks
from elastic_run.core.job.round_outcome import describe_lost
from elastic_run.core.job.state import (
    RUNNING,
    Job,
    Node,
    Seat,
    forget_place,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.documents import Round
    from elastic_run.core.protocol.facts import NodeInfo


def note_minimum(job: Job, config: JobConfig, now: float) -> Job:
    """Start the last call when enough nodes for a first round are there, and call it off when they no longer are."""
    is_enough = len(job.waiting) >= config.min_nodes
    if is_enough == (job.min_reached_at is not None):
        return job
    return replace(job, min_reached_at=now if is_enough else None)


def last_call_ends(job: Job, config: JobConfig) -> float | None:
    """Return when a first round is formed of the nodes that are there, or None."""
    if job.round > 0 or job.min_reached_at is None:
        return None
    return job.min_reached_at + config.last_call_timeout


def choose_ranks(job: Job, names: Sequence[str]) -> dict[str, int]:
    """Return the group ranks of these nodes, given in order of joining, in order of rank."""
    chosen = [job.nodes[name] for name in names]
    return assign_group_ranks(
        [Candidate(one.node, one.rank, one.node_info.preferred_rank, one.node_info.location) for one in chosen]
    )


def assign(job: Job, proposed: Round, ranks: Mapping[str, int]) -> dict[str, Assignment]:
    """Return what each member of a proposed round needs to know, by node, in order of rank."""
    members = [job.nodes[name] for name in ranks]
    sizes = [(member.node_info.role, member.node_info.local_world_size) for member in members]
    world_size = sum(size for _, size in sizes)
    versions = describe_versions(member.node_info for member in members)
    hosts = len({member.node_info.host for member in members})
    news = _tell_news(job, sorted((node for node in members if node.rank is None), key=lambda node: node.arrived))
    return {
        member.node: Assignment(
            round=proposed.number,
            group_rank=rank,
            group_world_size=len(members),
            base_rank=place.base_rank,
            world_size=world_size,
            role_rank=place.role_rank,
            role_world_size=place.role_world_size,
            master=members[0].store_address,
            restart_count=job.restart_count,
            hosts=hosts,
            news=news,
            incarnation=proposed.root,
            round_id=proposed.round_id,
            config=job.config if member.has_other_config else None,
            versions=versions,
        )
        for rank, (member, place) in enumerate(zip(members, assign_worker_ranks(sizes), strict=True))
    }


def _tell_news(job: Job, newcomers: Sequence[Node]) -> str:
    """Say what is new since the last round."""
    lost = ", ".join(describe_lost(job))
    if job.round == 0:
        return f"without {lost}" if lost else ""  # nodes that were unhealthy
    new = ", ".join(list_hosts([node.node_info.host for node in newcomers]))
    told = (job.news, f"without {lost}" if lost else "", f"with {new}" if new else "")
    return "; ".join(text for text in told if text)


def form(job: Job, started: Round, assignments: Mapping[str, Assignment], now: float) -> Job:
    """Return the job whose round has just started with these members."""
    return replace(
        job,
        phase=RUNNING,
        nodes=MappingProxyType({name: _place(node, assignments.get(name)) for name, node in job.nodes.items()}),
        gone=MappingProxyType({name: forget_place(gone) for name, gone in job.gone.items()}),
        round=started.number,
        round_id=started.round_id,
        incarnation=started.root,
        seats=tuple(Seat(name, is_awaited=False) for name in assignments),
        round_restarts=job.restart_count,
        since=now,
        short_since=None,
        min_reached_at=None,
        until=None,
        news=next(iter(assignments.values())).news,
        root=None,
        hidden=None,
    )


def _place(node: Node, place: Assignment | None) -> Node:
    rank = None if place is None else place.group_rank
    return replace(node, rank=rank, is_member=rank is not None, failing=None, outcome="", is_suspecting=False)


#: Hosts of a version that are listed one by one; versions that are named.
_HOSTS = 3
_VERSIONS = 4
#: Characters of a version, which comes from the node.
_LENGTH = 30


def describe_versions(nodes: Iterable[NodeInfo]) -> str:
    """Return which hosts have which version of torch, the fewest hosts first; "" where at most one is told."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        if node.torch:
            hosts.setdefault(node.torch[:_LENGTH], []).append(node.host)
    if len(hosts) < 2:  # noqa: PLR2004 - two versions differ
        return ""
    rare_first = sorted(hosts.items(), key=lambda item: len(item[1]))
    return "; ".join(f"torch {version} on {_list(names)}" for version, names in rare_first[:_VERSIONS])


def _list(hosts: list[str]) -> str:
    return ", ".join(hosts if len(hosts) <= _HOSTS else fold_hosts(hosts))
