"""The sockets on which Python workers take requests for faults of --inject-fault (`diagnosis.fault_thread`)."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.core.agent.faults import plan_faults

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.agent.api import Worker
    from elastic_run.core.agent.faults import Fault


def open_to_faults(
    envs: Mapping[int, dict[str, str]], workers: Sequence[Worker], faults: Sequence[Fault], restart_count: int
) -> None:
    """Let Python workers take requests for faults, and tell them which ones begin with their start.

    Args:
        envs: The workers' environments by local rank.
        workers: The workers of this node.
        faults: All faults of the job.
        restart_count: Restarts so far.
    """
    from_start: dict[int, list[str]] = {}
    for planned in plan_faults(faults, attempt=restart_count, world_size=workers[0].world_size):
        action, _, module = planned.fault.action.partition(" ")
        if action == "import" or planned.is_armed_at_start:
            from_start.setdefault(planned.rank, []).append(module or action)
    for worker in workers:
        name = name_socket(restart_count, worker.local_rank)
        envs[worker.local_rank][contract.ENV_FAULTS] = " ".join((name, *from_start.get(worker.global_rank, ())))


def name_socket(restart_count: int, local_rank: int) -> str:
    """Return the name of a worker's abstract Unix socket."""
    return f"elastic-run-faults-{os.getpid()}-{restart_count}-{local_rank}"
