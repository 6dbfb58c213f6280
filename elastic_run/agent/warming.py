"""The beginning of warm workers: whether a job can have them, and with what its templates start (`--preload`)."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.loop import Loop
from elastic_run.multiprocessing.warm.engagement import WarmWorkers
from elastic_run.multiprocessing.warm.obstacles import find_obstacle
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.surroundings import Surroundings


def warm_up(around: Surroundings, preload: str) -> str:
    """Start the templates of an agent's workers, and set the agent's `warm` where that can be.

    Args:
        around: What the rounds of the agent share.
        preload: Names of modules, separated by commas, or `auto`.

    Returns:
        Why that can't be, for the user, or an empty string.
    """
    spec = around.group.spec
    argv = [str(spec.entrypoint), *map(str, spec.args)]
    if isinstance(spec.entrypoint, str):
        obstacle = find_obstacle(argv)
    else:
        obstacle = "functions are no commands (start_method='forkserver' is for them)"
    if not obstacle:
        try:
            around.warm = _start(around, preload.split(","), argv)
        except OSError as error:
            obstacle = error.strerror or str(error)
    return f"--preload={preload} can't apply: {obstacle}; workers start cold" if obstacle else ""


def _start(around: Surroundings, modules: list[str], argv: list[str]) -> WarmWorkers:
    """Start all templates, or none."""
    ranks = range(around.group.spec.local_world_size)
    affinities = {rank: around.options.affinities.get(rank) for rank in ranks}
    own = [contract.ENV_CUDA_VISIBLE_DEVICES] if around.group.spec.virtual_local_rank else []
    warm = WarmWorkers(modules, affinities, around.guardian, own=own, mask=around.mask)
    if not around.guardian.pid:
        around.guardian.start()
    try:
        # The longest of the command lines: each of them has to fit in its place (`title`).
        warm.start([argv[0], *macros.substitute(argv[1:], str(ranks[-1]))], _common_environment(around))
        around.make_room(len(ranks))  # after the template's start: workers keep the limit of descriptors
        warm.prepare()
    except OSError:
        _end(warm)
        raise
    return warm


def _common_environment(around: Surroundings) -> dict[str, str]:
    """Return the workers' variables, without what differs from worker to worker."""
    env = {
        **os.environ,
        contract.ENV_TOKEN: around.inherited_token,
        # Of the workers' variables the one that is the same for all and that torch reads.
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: os.environ.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    env.pop(contract.ENV_RDZV_TOKEN, None)
    return env


def _end(warm: WarmWorkers) -> None:
    """End what was started before something failed; there is no agent yet whose loop could see it end."""
    with Loop() as loop:
        warm.attach(loop, lambda _: None)
        warm.close()
