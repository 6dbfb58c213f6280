"""The environment variables of a node's workers: torchrun's contract, as pure functions.

Source: torch 2.13, LocalElasticAgent._start_workers; our own variables are defined in `contract`.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.agent.api import Worker, WorkerGroup, WorkerSpec


def worker_environments(
    group: WorkerGroup,
    parent: Mapping[str, str],
    *,
    run_id: str,
    restart_count: int,
    max_restarts: int,
    use_agent_store: bool,
    signals: Sequence[int],
    more: Mapping[str, str] | None = None,
) -> dict[int, dict[str, str]]:
    """Return the variables that each worker of a node gets on top of the launcher's own environment.

    Args:
        group: The round's group, with its master address and its workers' ranks.
        parent: The launcher's environment.
        run_id: The job.
        restart_count: Restarts so far.
        max_restarts: Restarts that are allowed.
        use_agent_store: Whether the store at the master address is served by the agent.
        signals: Signals that stop the job; a launcher inside the worker takes them over.
        more: Variables that follow from the agent's options.

    Returns:
        Names and values, by local rank.

    Raises:
        ValueError: With virtual local ranks, more workers than visible devices.
    """
    spec = group.spec
    shared = {
        contract.ENV_GROUP_RANK: str(group.group_rank),
        contract.ENV_ROLE_NAME: spec.role,
        contract.ENV_LOCAL_WORLD_SIZE: str(spec.local_world_size),
        contract.ENV_GROUP_WORLD_SIZE: str(group.group_world_size),
        contract.ENV_MASTER_ADDR: str(group.master_addr),
        contract.ENV_MASTER_PORT: str(group.master_port),
        contract.ENV_RESTART_COUNT: str(restart_count),
        contract.ENV_MAX_RESTARTS: str(max_restarts),
        contract.ENV_RUN_ID: run_id,
        contract.ENV_USE_AGENT_STORE: str(use_agent_store),
        contract.ENV_SIGNALS_TO_HANDLE: ",".join(signal_name(number) for number in signals),
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: parent.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    shared.update(more or {})
    return {worker.local_rank: {**shared, **_own_environment(spec, worker, parent)} for worker in group.workers}


def _own_environment(spec: WorkerSpec, worker: Worker, parent: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which the workers of a node differ."""
    env = {
        contract.ENV_LOCAL_RANK: str(worker.local_rank),
        contract.ENV_RANK: str(worker.global_rank),
        contract.ENV_ROLE_RANK: str(worker.role_rank),
        contract.ENV_WORLD_SIZE: str(worker.world_size),
        contract.ENV_ROLE_WORLD_SIZE: str(worker.role_world_size),
    }
    if spec.virtual_local_rank:
        env[contract.ENV_LOCAL_RANK] = "0"
        from elastic_run.cluster.devices import virtual_device

        env |= virtual_device(worker.local_rank, parent)
    return env
