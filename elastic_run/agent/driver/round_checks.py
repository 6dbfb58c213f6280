"""The checks before this node takes part in a round: the old workers' GPU memory is free, the health check passes.

The checks run between two rounds, or before the first one. Heartbeats and the loop go on during the checks, and no
round waits for a node that has not said that it is ready. Most jobs have no check, and import none of this.

A check is a command beside the workers that never holds the agent up:
- It has a session of its own, /dev/null as stdin, and one pipe as stdout and stderr. The loop reads the pipe, so that a
  command may print a gigabyte; its last bytes are kept.
- The check has ended when its first process has, even if another process still holds the pipe. Then, and at the
  timeout, SIGKILL goes to all processes that it has started: by session, and by the launcher's token, as with workers.
  There is no grace: a process that hangs in a driver does not act on SIGTERM either.
- A process that SIGKILL can't end (uninterruptible sleep) is given up after some seconds.
- The guardian knows of it: it does not outlive the agent.
"""

from __future__ import annotations

import os
import re
import shlex

from elastic_run import contract
from elastic_run.cluster.devices import find_query, read_pids
from elastic_run.multiprocessing.process import process_table
from elastic_run.multiprocessing.process.fork_exec import inheritable_descriptors, inherited_environment, start_process
from elastic_run.multiprocessing.process.workers import Workers
from elastic_run.multiprocessing.starter import StartedWorker
from elastic_run.records import dataclass
from elastic_run.signals import SIGKILL, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.loop import Loop, Timer

#: Lines of the command's output that the reason holds, and characters of each.
_LINES = 3
_CHARACTERS = 160
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
#: Seconds for the GPUs' memory; a driver that is stuck does not answer at all.
WAIT_LIMIT = 10.0
_PAUSE = 0.1
#: Bytes of the output that are kept.
_KEPT = 8192
#: Bytes of one read: the size of a pipe.
_PIECE = 1 << 16


class RoundChecks:
    """The checks before one round; `on_unhealthy` gets the reason when the health check has failed."""

    def __init__(
        self,
        loop: Loop,
        context: AgentContext,
        *,
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_unhealthy: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._say = say
        self._on_ready = on_ready
        self._on_unhealthy = on_unhealthy
        self._wait: GpuMemoryWait | None = None
        self._check: CheckProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process of a check lives."""
        return any(part is not None and part.is_running for part in (self._wait, self._check))

    def begin(self, old_pids: Collection[int]) -> None:
        """Begin; `old_pids` are those of the workers of the round before."""
        query = find_query(os.environ) if old_pids else None
        if query is None:
            self._check_health()
            return
        self._wait = GpuMemoryWait(self._loop, self._context, say=self._say, on_end=self._check_health)
        self._wait.begin(query, old_pids)

    def cancel(self) -> None:
        """End the checks; no callback is called."""
        for part in (self._wait, self._check):
            if part is not None:
                part.cancel()

    def _check_health(self) -> None:
        config = self._context.options.node_config
        if not config.health_check:
            self._on_ready()
            return
        self._check = CheckProcess(self._loop, self._context, self._take_end)
        try:
            self._check.start(shlex.split(config.health_check), timeout=config.health_check_timeout)
        except OSError as error:
            self._on_unhealthy(f"{config.health_check} can't be started: {error.strerror}")

    def _take_end(self, end: CheckEnd) -> None:
        if end.exitcode == 0 and not end.is_late:
            self._on_ready()
        else:
            self._on_unhealthy(describe_end(end, self._context.options.node_config.health_check_timeout))


def describe_end(end: CheckEnd, timeout: float) -> str:
    """Say how a health check failed, with its last lines, in a clause of one line."""
    if end.is_late:
        what = f"the health check did not end within {timeout:g} s"
    elif end.exitcode < 0:
        what = f"the health check was killed by {signal_name(-end.exitcode)}"
    else:
        what = f"the health check ended with exit code {end.exitcode}"
    if end.survivors:
        what += f", and SIGKILL does not end it (pid {', '.join(map(str, end.survivors))})"
    lines = [_make_plain(line) for line in end.output.splitlines()]
    shown = " | ".join([line[-_CHARACTERS:] for line in lines if line][-_LINES:])
    return f"{what}: {shown}" if shown else what


def _make_plain(line: str) -> str:
    """Return a line without colours, tabs and other characters that a terminal obeys."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in _ESCAPE.sub("", line)).split())


class GpuMemoryWait:
    """Waits until the GPUs have taken back the memory of workers that have ended.

    The driver frees the memory of a process when the last of its descriptors is closed, which may come after the
    process's end: workers that start at once find their GPU full. nvidia-smi lists the processes that hold memory. It
    can't wait for a change, so it is run again and again (a case of law 2's list), for some seconds at most. In a
    container that hides the processes of the host nvidia-smi lists none, and nothing is waited for.
    """

    def __init__(
        self, loop: Loop, context: AgentContext, *, say: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._say = say
        self._on_end = on_end
        self._context = context
        self._process: CheckProcess | None = None
        self._timer: Timer | None = None
        self._began_at = loop.now()
        self._has_said = False

    @property
    def is_running(self) -> bool:
        """Whether a process of it lives."""
        return self._process is not None and self._process.is_running

    def begin(self, query: tuple[str, ...], pids: Collection[int]) -> None:
        """Wait for the memory of workers that have ended; for `query` see `gpu_processes.find_query`."""
        left = self._began_at + WAIT_LIMIT - self._loop.now()
        self._process = CheckProcess(self._loop, self._context, lambda end: self._take(query, pids, end))
        try:
            self._process.start(query, timeout=max(left, _PAUSE))
        except OSError:
            self._on_end()  # the query can't be started, so nothing is known of the memory

    def cancel(self) -> None:
        """End the wait; `on_end` is not called."""
        self._on_end = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.cancel()

    def _take(self, query: tuple[str, ...], pids: Collection[int], end: CheckEnd) -> None:
        holders = sorted(read_pids(end.output) & set(pids))
        name, all_the_same = os.path.basename(query[0]), "the workers start anyway"
        if end.is_late:
            self._say(f"{name} did not answer within {WAIT_LIMIT:g} s; {all_the_same}")
        elif holders and self._loop.now() + _PAUSE >= self._began_at + WAIT_LIMIT:
            self._say(f"GPU memory of {_describe(holders)} is not free after {WAIT_LIMIT:g} s; {all_the_same}")
        elif holders:
            if not self._has_said:
                self._say(f"waiting until the GPU memory of {_describe(holders)} is free")
                self._has_said = True
            self._timer = self._loop.call_later(_PAUSE, lambda: self.begin(query, pids))
            return
        self._on_end()


def _describe(pids: list[int]) -> str:
    return f"the old worker{'s' * (len(pids) > 1)} (pid {', '.join(map(str, pids))})"


@dataclass(frozen=True, slots=True)
class CheckEnd:
    """How a command ended; it is late if it was killed at the timeout, and SIGKILL could not end the survivors."""

    exitcode: int
    is_late: bool
    output: str
    survivors: tuple[int, ...]


class CheckProcess:
    """One run of a command; `on_end` is called once, when nothing of it is left, unless it was cancelled."""

    def __init__(self, loop: Loop, context: AgentContext, on_end: Callable[[CheckEnd], None]) -> None:
        self._loop = loop
        self._context = context
        self._on_end: Callable[[CheckEnd], None] | None = on_end
        self._workers = Workers(loop, context.guardian, on_exit=self._on_exit, adopts=lambda: context.adopts_orphans)
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
        """Start the command; it is killed after `timeout` seconds.

        Args:
            argv: The program, looked up in PATH unless it has a slash, and its arguments.
            more: Variables beside the launcher's own.
            timeout: Seconds, or None for no limit.
            kept: Descriptors that it inherits under their own numbers.

        Raises:
            OSError: The system can't execute it.
        """
        guardian = self._context.guardian
        self._context.adopt_orphans()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            env = {**inherited_environment(), **(more or {})}
            if timeout is not None:  # else it outlives a round, at whose end every process with the token is ended
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
        born = process_table.start_time(pid)
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
