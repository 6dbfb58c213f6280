"""The beginning of warm workers: whether a job can have them, and with what its templates start (`--preload`)."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.warm.engagement import WarmWorkers
from elastic_run.multiprocessing.warm.obstacles import find_obstacle
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.surroundings import Surroundings


def warm_up(around: Surroundings, preload: str) -> str:
    """Start the templates of an agent's workers, and set the agent's `warm`.

    Args:
        around: What the rounds of the agent share.
        preload: Names of modules, separated by commas, or `auto`.

    Returns:
        Why that can't be, for the user, or an empty string.
    """
    spec = around.group.spec
    argv = [str(spec.entrypoint), *map(str, spec.args)]
    if isinstance(spec.entrypoint, str):
        obstacle = find_obstacle(argv) or _start(around, preload.split(","), argv)
    else:
        obstacle = "functions are no commands (start_method='forkserver' is for them)"
    return f"--preload={preload} can't apply: {obstacle}; workers start cold" if obstacle else ""


def _start(around: Surroundings, modules: list[str], argv: list[str]) -> str:
    """Start the templates, or return why not."""
    env = {
        **os.environ,
        contract.ENV_TOKEN: around.inherited_token,
        # Of the workers' variables the one that is the same for all and that torch reads.
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: os.environ.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    env.pop(contract.ENV_RDZV_TOKEN, None)
    ranks = range(around.group.spec.local_world_size)
    affinities = {rank: around.options.affinities.get(rank) for rank in ranks}
    try:
        warm = WarmWorkers(modules, affinities, around.guardian)
        if not around.guardian.pid:
            around.guardian.start()
        # Set first: what was started before something failed has to be ended.
        around.warm = warm
        # The longest of the command lines: each of them has to fit in its place (`title`).
        warm.start(macros.substitute(argv, str(ranks[-1])), env)
        around.make_room(len(ranks))  # after the template's start: workers keep the limit of descriptors
        warm.prepare()
    except OSError as error:
        return error.strerror or str(error)
    return ""
