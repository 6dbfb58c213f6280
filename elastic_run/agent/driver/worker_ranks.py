"""The ranks of a node's workers in a round.

Our own rendezvous delivers these ranks. A foreign rendezvous delivers the ranks of nodes only. In that case each agent
writes the number and the role of its workers into the round's store, as torch's agents do. The agent of rank 0 computes
the ranks for all, so that the exchange costs O(N).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.agent.api import WorkerGroup, WorkerSpec

_SIZE_KEY = "elastic_run/size/{}"
_RANKS_KEY = "elastic_run/place/{}"


def assign_ranks(
    group: WorkerGroup,
    *,
    group_rank: int,
    group_world_size: int,
    base_rank: int,
    world_size: int,
    role_rank: int,
    role_world_size: int,
) -> None:
    """Give a group's workers their ranks."""
    group.group_rank, group.group_world_size = group_rank, group_world_size
    for worker in group.workers:
        worker.global_rank = base_rank + worker.local_rank
        worker.role_rank = role_rank + worker.local_rank
        worker.world_size, worker.role_world_size = world_size, role_world_size


def exchange_ranks(group: WorkerGroup, found: Any) -> None:
    """Give a group's workers their ranks in a round of which only the nodes' ranks are known."""
    place = ask_for_ranks(found.store, found.rank, found.world_size, group.spec)
    base_rank, world_size, role_rank, role_world_size = place
    assign_ranks(
        group,
        group_rank=found.rank,
        group_world_size=found.world_size,
        base_rank=base_rank,
        world_size=world_size,
        role_rank=role_rank,
        role_world_size=role_world_size,
    )


def ask_for_ranks(
    store: Any,
    group_rank: int,
    group_world_size: int,
    spec: WorkerSpec,
) -> tuple[int, int, int, int]:
    """Find out where a node's workers stand among all.

    Returns:
        Global rank of the first worker, number of workers, rank of the first among its role, size of the role.

    Raises:
        Exception: Whatever the round's store raises when a node doesn't tell in time.
    """
    size = spec.local_world_size
    if group_world_size == 1:
        return 0, size, 0, size
    import json

    store.set(_SIZE_KEY.format(group_rank), json.dumps([spec.role, size]))
    if group_rank == 0:
        from elastic_run.core.job.ranks import assign_worker_ranks

        told = [json.loads(store.get(_SIZE_KEY.format(rank))) for rank in range(group_world_size)]
        sizes = [(str(role), int(size)) for role, size in told]
        world_size = sum(size for _, size in sizes)
        for rank, ranks in enumerate(assign_worker_ranks(sizes)):
            place = [ranks.base_rank, world_size, ranks.role_rank, ranks.role_world_size]
            store.set(_RANKS_KEY.format(rank), json.dumps(place))
    base_rank, world_size, role_rank, role_world_size = map(int, json.loads(store.get(_RANKS_KEY.format(group_rank))))
    return base_rank, world_size, role_rank, role_world_size
