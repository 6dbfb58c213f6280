"""What a round waits for on this node: its health check, and the template of its warm workers; and kept state.

A health check (`--health-check`) is a command beside the workers that never holds the agent up, nor outlives it:
- It has a session of its own, /dev/null as stdin, and one pipe as stdout and stderr, of which the last bytes are kept.
- It has ended when its first process has. Then, and at the timeout, SIGKILL goes to all processes that it has started,
  without a grace: a process that hangs in a driver does not act on SIGTERM either.
"""

from __future__ import annotations

import os
import shlex
import sys

from elastic_run import contract
from elastic_run.multiprocessing.fork_exec import (
    inheritable_descriptors,
    inherited_environment,
    own_interpreter,
    start_process,
    start_time,
)
from elastic_run.multiprocessing.starter import StartedWorker
from elastic_run.multiprocessing.workers import Workers
from elastic_run.records import dataclass
from elastic_run.signals import SIGKILL, signal_name
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.kept_memory import KeptMemories
    from elastic_run.loop import Timer
    from elastic_run.multiprocessing.warm.worker_pool import WorkerPool

#: Lines of the command's output that the reason holds, and characters of each.
_LINES = 3
_CHARACTERS = 160
#: Seconds after which a server of kept state that has ended is started again.
_LEAST_RUN = 1.0
#: Bytes of the output that are kept, and bytes of one read: the size of a pipe.
_KEPT = 8192
_PIECE = 1 << 16
#: The file whose line lets a process of this interpreter become a template.
_START_FILE = "elastic-run-compat.pth"
#: Python's own options before the program, without those with a value, those that keep it from reading .pth files (-S;
#: -I and -s: those of the user), and -i, which changes what comes next.
_OPTIONS = frozenset("bBdEOPqRuv")


def check_health(context: AgentContext, on_end: Callable[[str], None]) -> CheckProcess:
    """Run the health check; `on_end` gets the reason why this node is unhealthy, or ""."""
    config = context.options.node_config
    process = CheckProcess(context, lambda end: on_end(describe_end(end, config.health_check_timeout)))
    try:
        process.start(shlex.split(config.health_check), timeout=config.health_check_timeout)
    except OSError as error:
        on_end(f"{config.health_check} can't be started: {error.strerror}")
    return process


@dataclass(frozen=True, slots=True)
class CheckEnd:
    """How a command ended; it is late if it was killed at the timeout, and SIGKILL could not end the survivors."""

    exitcode: int
    is_late: bool
    output: str
    survivors: tuple[int, ...]


def describe_end(end: CheckEnd, timeout: float) -> str:
    """Say how a health check failed, with its last lines, in a clause of one line; "" if it has passed."""
    if end.is_late:
        what = f"the health check did not end within {timeout:g} s"
    elif end.exitcode < 0:
        what = f"the health check was killed by {signal_name(-end.exitcode)}"
    elif end.exitcode:
        what = f"the health check ended with exit code {end.exitcode}"
    else:
        return ""
    if end.survivors:
        what += f", and SIGKILL does not end it (pid {', '.join(map(str, end.survivors))})"
    lines = [_make_plain(line) for line in end.output.splitlines()]
    shown = " | ".join([line[-_CHARACTERS:] for line in lines if line][-_LINES:])
    return f"{what}: {shown}" if shown else what


def _make_plain(line: str) -> str:
    """Return a line without colours, tabs and other characters that a terminal obeys."""
    import re

    plain = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", line)
    return " ".join("".join(sign if sign.isprintable() else " " for sign in plain).split())


class CheckProcess:
    """One run of a command; `on_end` is called once, when nothing of it is left, unless it was cancelled.

    A process that `is_apart` runs beside the rounds: their end does not end it, nor its end their processes.
    """

    def __init__(self, context: AgentContext, on_end: Callable[[CheckEnd], None], *, is_apart: bool = False) -> None:
        self._loop = context.loop
        self._context = context
        self._on_end: Callable[[CheckEnd], None] | None = on_end
        self._is_apart = is_apart
        self._workers = Workers(
            self._loop,
            context.guardian,
            on_exit=self._on_exit,
            adopts=None if is_apart else lambda: context.adopts_orphans,
            is_apart=is_apart,
        )
        self._timer: Timer | None = None
        self._reader = -1
        self._kept = bytearray()
        self._exitcode = 0
        self._is_late = False
        self._is_stopping = False
        self.is_running = False

    def start(
        self,
        argv: Sequence[str],
        more: Mapping[str, str] | None = None,
        *,
        timeout: float | None,
        kept: Sequence[int] = (),
    ) -> None:
        """Start the command, killed after `timeout` seconds, with `more` variables and descriptors `kept`; OSError."""
        guardian = self._context.guardian
        self._context.adopt_orphans()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            env = {**inherited_environment(), **(more or {})}
            if not self._is_apart:  # at the end of a round every process with the token is ended
                env[contract.ENV_TOKEN] = guardian.worker_token
            pid = start_process(
                argv,
                env,
                stdin=null,
                stdout=writer,
                stderr=writer,
                closed=inheritable_descriptors(),
                kept=kept,
                mask=self._context.mask,
            )
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)
            os.close(null)
        born = start_time(pid)
        guardian.watch(pid, born)
        self.is_running = True
        self._loop.add_reader(self._reader, self._read)
        if timeout is not None:
            self._timer = self._loop.call_later(timeout, self._on_timeout)
        self._workers.adopt(0, StartedWorker(pid, born))

    def cancel(self) -> None:
        """Kill the command; `on_end` is not called."""
        self._on_end = None
        self._stop()

    def _on_timeout(self) -> None:
        self._is_late = not self._is_stopping
        self._stop()

    def _on_exit(self, _: int, exitcode: int) -> None:
        self._exitcode = exitcode
        self._stop()

    def _stop(self) -> None:
        if self.is_running and not self._is_stopping:
            self._is_stopping = True
            self._workers.stop(SIGKILL, 0.0, self._on_gone)

    def _read(self) -> None:
        """Read one piece, if there is any."""
        try:
            piece = os.read(self._reader, _PIECE)
        except BlockingIOError:
            return
        if not piece:
            self._loop.remove_reader(self._reader)
        self._kept += piece
        del self._kept[:-_KEPT]

    def _on_gone(self, survivors: list[int]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A survivor may go on writing: no more than the pipe can hold is read.
        for _ in range(2 * _PIECE // 4096):
            self._read()
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        self.is_running = False
        if self._on_end is not None:
            output = self._kept.decode(errors="replace")
            self._on_end(CheckEnd(self._exitcode, self._is_late, output, tuple(survivors)))


# --- kept state (--keep-state) ----------------------------------------------------------------------------------------
def serve_kept_state(context: AgentContext, kept: KeptMemories) -> Callable[[], None]:
    """Run the process that gives this node's kept state to other nodes, if there may be others; return what ends it."""
    running: list[CheckProcess] = []

    def start(argv: Sequence[str], variables: Mapping[str, str], listening: int) -> None:
        begun = context.loop.now()

        def tell(end: CheckEnd) -> None:
            how = f"was killed by {signal_name(-end.exitcode)}" if end.exitcode < 0 else "has ended"
            is_again = context.loop.now() - begun > _LEAST_RUN
            what = "it is started again" if is_again else f"other nodes can't read it: {end.output.strip()[-500:]}"
            context.say(f"the process that serves the kept state {how}; {what}")
            if is_again:
                start(argv, variables, listening)

        running[:] = [CheckProcess(context, tell, is_apart=True)]
        try:
            running[0].start(argv, variables, timeout=None, kept=(listening,))
        except OSError as error:
            context.say(f"the kept state can't be served to other nodes: {error.strerror}")

    if (command := kept.serve_command()) is not None:
        start(*command)

    def end() -> None:
        for process in running:
            process.cancel()

    return end


def write_kept_state(context: AgentContext, kept: KeptMemories, *, is_stopped: Callable[[], bool]) -> None:
    """Write the state that the workers have kept to a disk, if the user has named a place; a signal ends it."""
    directory, timeout = context.options.agent_config.keep_state_dir, context.options.shutdown_timeout
    if not directory:
        return

    def tell(end: CheckEnd) -> None:
        late = f"the kept state was not written to {directory} within {timeout:g} s"
        lines = end.output.strip().splitlines()
        context.say(late if end.is_late else lines[-1] if lines else "there is no kept state to write")

    process = CheckProcess(context, tell)
    try:
        process.start(*kept.write_command(directory), timeout=timeout)
    except OSError as error:
        context.say(f"the kept state was not written to {directory}: {error}")
        return
    context.loop.run_until(lambda: not process.is_running or is_stopped())
    if process.is_running:
        process.cancel()
        context.loop.run_until(lambda: not process.is_running)


# --- warm workers (--preload) -----------------------------------------------------------------------------------------
def start_preload(context: AgentContext, preload: str) -> str:
    """Start the templates of an agent's workers, and set its `worker_pool`; return why that is impossible, or ""."""
    spec = context.group.spec
    argv = [str(spec.entrypoint), *map(str, spec.args)]
    if isinstance(spec.entrypoint, str):
        obstacle = find_obstacle(argv)
    else:
        obstacle = "functions are no commands (start_method='forkserver' is for them)"
    if not obstacle:
        modules = preload.split(",")
        if context.kept is not None:  # its import of torch.distributed.checkpoint takes 0.7 s in each worker
            modules.append("elastic_run.worker.kept_state")
        try:
            context.worker_pool = _start_templates(context, modules, argv)
        except OSError as error:
            obstacle = error.strerror or str(error)
    return f"--preload={preload} can't apply: {obstacle}; workers start cold" if obstacle else ""


def _start_templates(context: AgentContext, modules: list[str], argv: list[str]) -> WorkerPool:
    """Start all templates, or none."""
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.warm.worker_pool import WorkerPool

    spec = context.group.spec
    affinities = {rank: context.options.affinities.get(rank) for rank in range(spec.local_world_size)}
    own = [contract.ENV_CUDA_VISIBLE_DEVICES, contract.ENV_HIP_VISIBLE_DEVICES] if spec.virtual_local_rank else []
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
        worker_pool.start([argv[0], *macros.substitute(argv[1:], str(spec.local_world_size - 1))], environment)
        context.make_room()  # after the template's start: workers keep the limit of descriptors
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
