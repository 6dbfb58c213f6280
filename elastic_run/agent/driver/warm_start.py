"""Warm workers of an agent (`--preload`): starts their templates, and holds each round until its forks are there."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.core.agent import messages
from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.fork_exec import inherited_environment
from elastic_run.multiprocessing.warm.obstacles import find_obstacle
from elastic_run.multiprocessing.warm.worker_pool import WorkerPool
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.core.agent.messages import Event


def start_preload(context: AgentContext, preload: str) -> str:
    """Start the templates of an agent's workers, and set the agent's `worker_pool` if that is possible.

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
    environment = {
        **{name: value for name, value in inherited_environment().items() if name not in own},
        contract.ENV_TOKEN: context.guardian.worker_token,
        # The one variable of the workers that torch reads at its import and that is the same for all.
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: os.environ.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    try:
        # The longest command line: each worker's command line has to fit into the template's (`process_title`).
        worker_pool.start([argv[0], *macros.substitute(argv[1:], str(ranks[-1]))], environment)
        context.make_room(len(ranks))  # after the template's start: workers keep the limit of descriptors
        worker_pool.prepare()
    except OSError:
        with Loop() as loop:  # no agent's loop runs yet that could see the templates end
            worker_pool.attach(loop, lambda _: None)
            worker_pool.close()
        raise
    return worker_pool


class HeldRound:
    """Keeps a formed round back until its warm workers are ready, or are given up and start cold."""

    def __init__(self, worker_pool: WorkerPool, begin: Callable[[messages.RoundFormed], None]) -> None:
        self._worker_pool = worker_pool
        self._begin = begin
        self._round: messages.RoundFormed | None = None

    def takes(self, event: Event) -> bool:
        """Whether an event is held back or dropped during the wait; other events may end the wait.

        A verdict is processed at once, and the round never begins. Any other event of the round is processed after the
        round has begun.
        """
        if isinstance(event, messages.Signalled):
            return False
        if isinstance(event, messages.RoundFormed) and not self._worker_pool.is_settled:
            self._round = event
            self._worker_pool.await_settled(self._release)
            return True
        if self._round is None or isinstance(event, messages.JobOver):
            return False
        if isinstance(event, messages.RoundWarned):
            return True  # there are no workers to warn
        self._release()
        return False

    def _release(self) -> None:
        event, self._round = self._round, None
        if event is not None:
            self._begin(event)
