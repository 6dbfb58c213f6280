"""Warm workers of an agent (`--preload`): starts their templates, and holds each round until its forks are there."""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.core.agent import messages
from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.fork_exec import inherited_environment
from elastic_run.multiprocessing.process.interpreter import own_interpreter
from elastic_run.multiprocessing.warm.worker_pool import WorkerPool
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.core.agent.messages import Event


#: The file whose line lets a process of this interpreter become a template.
_START_FILE = "elastic-run-compat.pth"
#: Python's own options before the program, without those with a value, those that keep it from reading .pth files (-S;
#: -I and -s: those of the user), and -i, which changes what comes next.
_OPTIONS = frozenset("bBdEOPqRuv")


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
        # The longest command line: each worker's command line has to fit into the template's (`ProcessTitle`).
        worker_pool.start([argv[0], *macros.substitute(argv[1:], str(ranks[-1]))], environment)
        context.make_room(len(ranks))  # after the template's start: workers keep the limit of descriptors
        worker_pool.prepare()
    except OSError:
        with Loop() as loop:  # no agent's loop runs yet that could see the templates end
            worker_pool.attach(loop, lambda _: None)
            worker_pool.close()
        raise
    return worker_pool


def find_obstacle(argv: Sequence[str]) -> str:
    """Return why workers with a command line can't be forks of a template, or an empty string."""
    program = argv[0]
    if not _is_this_interpreter(program):
        own = own_interpreter() or sys.executable
        return f"the workers run {program}, which is not the Python of elastic-run, {own}"
    position = _find_program(argv)
    if position is None:
        return f"the options of {program} don't allow it"
    beginning = list(argv[: position + 1])
    if macros.substitute(beginning, "0") != macros.substitute(beginning, "1"):
        return f"{argv[position]} differs from worker to worker"
    if not _has_start_file():
        return f"{_START_FILE} isn't there, or is of an older release: install elastic-run into {sys.prefix}"
    return ""


def _is_this_interpreter(program: str) -> bool:
    """Whether it is the same file in the same directory: from another one it may be of another environment."""
    if not os.path.isabs(program):
        return False
    own, others = os.path.normpath(own_interpreter()), os.path.normpath(program)
    return os.path.dirname(own) == os.path.dirname(others) and os.path.realpath(own) == os.path.realpath(others)


def _find_program(argv: Sequence[str]) -> int | None:
    """Return the position of the script, or of the word behind -m or -c."""
    for position, word in enumerate(argv[1:], start=1):
        if word in ("-m", "-c"):
            return position + 1 if position + 1 < len(argv) else None
        if not word.startswith("-") or word == "-":
            return position
        if not set(word[1:]) <= _OPTIONS:
            return None
    return None


def _has_start_file() -> bool:
    """Whether the file is where Python reads it at its start; Python reads no .pth file in PYTHONPATH, for example."""
    import site

    read = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else ())}
    needle = contract.ENV_TEMPLATE.encode()
    for directory in read.intersection(sys.path):
        try:
            with open(os.path.join(directory, _START_FILE), "rb") as file:
                if needle in file.read():
                    return True
        except OSError:
            pass
    return False


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
