"""Joins a round: opens this node's workers' store, takes part in the rendezvous, and takes over the ranks.

This needs neither the loop nor the console: a store's port is open, and its address is published, before the store is
served.
"""

from __future__ import annotations

import os

from elastic_run.store.errors import GARBAGE, UNKNOWN
from elastic_run.store.worker_store import LOCALHOST, is_served_by_agent, open_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import WorkerGroup, WorkerSpec
    from elastic_run.loop import Loop
    from elastic_run.store.worker_store import PortTakenError, WorkerStore

_SIZE_KEY = "elastic_run/size/{}"
_RANKS_KEY = "elastic_run/place/{}"


class RoundJoin:
    """Joins round after round.

    Args:
        group: The workers; their ranks and the master address are set.
        requested_store: The server of the workers' store that the user asked for: `auto`, `agent`, `rank0` or `torch`.

    Attributes:
        store: The workers' store of this node; None before it is opened, or if the rendezvous takes none.
    """

    def __init__(self, group: WorkerGroup, requested_store: str) -> None:
        self.store: WorkerStore | None = None
        self._old_store: WorkerStore | None = None
        self._group = group
        self._requested_store = requested_store
        self._has_unknown_operation = False
        self._loop: Loop | None = None
        self._say: Callable[[str], None] = lambda _: None

    @property
    def is_immediate(self) -> bool:
        """Whether the rendezvous never waits for other nodes."""
        return bool(getattr(self._group.spec.rdzv_handler, "is_immediate", False))

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers' store is served for them, so that worker 0 does not serve it."""
        return self._group.spec.rdzv_handler.use_agent_store if self.store is None else self.store.use_agent_store

    def serve(self, loop: Loop, say: Callable[[str], None]) -> None:
        """Serve the store of this round and of all later rounds."""
        self._loop = loop
        self._say = say
        if self.store is not None:
            self.store.serve(loop)

    def offer_store(self) -> None:
        """Open a fresh store for the next round, and give its address to the rendezvous."""
        offer = getattr(self._group.spec.rdzv_handler, "offer_worker_store", None)
        if offer is not None:
            store = self.renew_store()
            offer(store.host, store.port, use_agent_store=store.use_agent_store)

    def describe_taken_port(self, error: PortTakenError) -> str:
        """Tell the user that another process has the port of `--master-port`, and how to solve that."""
        if self._group.spec.rdzv_handler.get_backend() != "static":
            return f"--master-port: {error}"
        return (
            f"--master-port: {error.fact}: choose another port, the same on all nodes; if that process is another node "
            "of this job, give this node another --node-rank"
        )

    def take_place(self) -> None:
        """Wait for the next round, and take this node's place in it.

        Raises:
            RendezvousError: There is no round; a foreign handler may raise anything else.
        """
        group, spec = self._group, self._group.spec
        found = spec.rdzv_handler.next_rendezvous()
        group.store = found.store
        info = found.bootstrap_store_info
        if self.store is not None and info is not None:
            group.master_addr, group.master_port = info.master_addr, info.master_port
        else:
            group.master_addr = spec.master_addr or (info.master_addr if info is not None else None)
            group.master_port = spec.master_port or (info.master_port if info is not None else None)
        base_rank, world_size, role_rank, role_world_size = ask_for_ranks(
            found.store, found.rank, found.world_size, spec
        )
        assign_ranks(
            group,
            group_rank=found.rank,
            group_world_size=found.world_size,
            base_rank=base_rank,
            world_size=world_size,
            role_rank=role_rank,
            role_world_size=role_world_size,
        )

    def open_next_store(self, host: str) -> WorkerStore:
        """Open the next round's store beside this round's, which workers of other nodes may still need."""
        self.close_old_store()
        self._old_store, self.store = self.store, None
        return self.renew_store(host)

    def close_old_store(self) -> None:
        """End the last round's store: a new round was formed, and no worker uses the old store any more."""
        if self._old_store is not None:
            self._old_store.close()
            self._old_store = None

    def close(self) -> None:
        """Give the ports back."""
        self.close_old_store()
        if self.store is not None:
            self.store.close()

    def renew_store(self, host: str = LOCALHOST) -> WorkerStore:
        """Replace the store of the last round by a fresh one; an empty host means all interfaces."""
        if self.store is not None and not self._has_unknown_operation:
            self.store = self.store.renew()
            return self.store
        if self.store is not None:
            self.store.close()
        self.store = open_worker_store(
            by_agent=not self._has_unknown_operation and is_served_by_agent(self._requested_store, os.environ),
            host=host,
            port=self._group.spec.master_port,
            on_refusal=self._say_refusal,
        )
        self._has_unknown_operation = False
        if self._loop is not None:
            self.store.serve(self._loop)
        return self.store

    def _say_refusal(self, kind: str, what: str) -> None:
        if kind == UNKNOWN:
            self._has_unknown_operation = True
            self._say(
                f"a worker's torch asked the store for what elastic-run doesn't know: {what}; "
                "the next round uses torch's own store, served by rank 0 (--worker-store=rank0 does at once)"
            )
        elif kind != GARBAGE:  # a port scanner is no news for the user
            self._say(f"the workers' store closed a connection: {what}")


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


def ask_for_ranks(
    store: Any,
    group_rank: int,
    group_world_size: int,
    spec: WorkerSpec,
) -> tuple[int, int, int, int]:
    """Ask where a node's workers stand among all, in a round of which only the nodes' ranks are known.

    Our own rendezvous delivers the workers' ranks. With a foreign one each agent writes the number and the role of its
    workers into the round's store, as torch's agents do. The agent of rank 0 computes the ranks for all, so that the
    exchange costs O(N).

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

        answers = [json.loads(store.get(_SIZE_KEY.format(rank))) for rank in range(group_world_size)]
        sizes = [(str(role), int(size)) for role, size in answers]
        world_size = sum(size for _, size in sizes)
        for rank, ranks in enumerate(assign_worker_ranks(sizes)):
            place = [ranks.base_rank, world_size, ranks.role_rank, ranks.role_world_size]
            store.set(_RANKS_KEY.format(rank), json.dumps(place))
    base_rank, world_size, role_rank, role_world_size = map(int, json.loads(store.get(_RANKS_KEY.format(group_rank))))
    return base_rank, world_size, role_rank, role_world_size
