"""The sockets on which Python workers take requests for faults of --inject-fault (`diagnosis.fault_thread`)."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.core.agent.faults import plan_faults
from elastic_run.diagnosis.worker_sockets import make_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.agent.api import Worker
    from elastic_run.core.agent.faults import Fault


def open_to_faults(
    envs: Mapping[int, dict[str, str]], workers: Sequence[Worker], faults: Sequence[Fault], restart_count: int
) -> dict[int, str]:
    """Let Python workers take requests for faults, and tell them which ones begin with their start.

    Args:
        envs: The workers' environments by local rank.
        workers: The workers of this node.
        faults: All faults of the job.
        restart_count: Restarts so far.

    Returns:
        The names of the workers' sockets by local rank.
    """
    from_start: dict[int, list[str]] = {}
    for planned in plan_faults(faults, attempt=restart_count, world_size=workers[0].world_size):
        action, _, module = planned.fault.action.partition(" ")
        if action == "import":
            from_start.setdefault(planned.rank, []).append(module)
    sockets = {worker.local_rank: make_name("faults") for worker in workers}
    for worker in workers:
        name = sockets[worker.local_rank]
        envs[worker.local_rank][contract.ENV_FAULTS] = " ".join((name, *from_start.get(worker.global_rank, ())))
    return sockets
