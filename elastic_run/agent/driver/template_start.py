"""Starts warm workers: checks whether a job can have them, and starts their templates (`--preload`)."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.fork_exec import inherited_environment
from elastic_run.multiprocessing.warm.obstacles import find_obstacle
from elastic_run.multiprocessing.warm.worker_pool import WorkerPool
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.context import AgentContext


def start_preload(context: AgentContext, preload: str) -> str:
    """Start the templates of an agent's workers, and set the agent's `worker_pool` if that is possible.

    Args:
        context: The state that all rounds of the agent share.
        preload: Names of modules, separated by commas, or `auto`.

    Returns:
        The reason why it is not possible, for the user, or an empty string.
    """
    spec = context.group.spec
    argv = [str(spec.entrypoint), *map(str, spec.args)]
    if isinstance(spec.entrypoint, str):
        obstacle = find_obstacle(argv)
    else:
        obstacle = "functions are no commands (start_method='forkserver' is for them)"
    if not obstacle:
        try:
            context.worker_pool = _start(context, preload.split(","), argv)
        except OSError as error:
            obstacle = error.strerror or str(error)
    return f"--preload={preload} can't apply: {obstacle}; workers start cold" if obstacle else ""


def _start(context: AgentContext, modules: list[str], argv: list[str]) -> WorkerPool:
    """Start all templates, or none."""
    ranks = range(context.group.spec.local_world_size)
    affinities = {rank: context.options.affinities.get(rank) for rank in ranks}
    devices = [contract.ENV_CUDA_VISIBLE_DEVICES, contract.ENV_HIP_VISIBLE_DEVICES]
    own = devices if context.group.spec.virtual_local_rank else []
    worker_pool = WorkerPool(modules, affinities, context.guardian, own=own, mask=context.mask)
    if not context.guardian.pid:
        context.guardian.start()
    try:
        # The longest command line: each worker's command line has to fit into the template's (`process_title`).
        worker_pool.start([argv[0], *macros.substitute(argv[1:], str(ranks[-1]))], _common_environment(context, own))
        context.make_room(len(ranks))  # after the template's start: workers keep the limit of descriptors
        worker_pool.prepare()
    except OSError:
        _end(worker_pool)
        raise
    return worker_pool


def _common_environment(context: AgentContext, own: list[str]) -> dict[str, str]:
    """Return the variables that are the same for all workers."""
    return {
        **{name: value for name, value in inherited_environment().items() if name not in own},
        contract.ENV_TOKEN: context.guardian.worker_token,
        # The one variable of the workers that torch reads at its import and that is the same for all.
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: os.environ.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }


def _end(worker_pool: WorkerPool) -> None:
    """End the templates that were started before a failure; no agent's loop runs yet that could see them end."""
    with Loop() as loop:
        worker_pool.attach(loop, lambda _: None)
        worker_pool.close()
