"""A command beside the workers: a check that never holds the agent up.

Rules
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

from elastic_run import contract
from elastic_run.multiprocessing.process import process_table
from elastic_run.multiprocessing.process.fork_exec import inheritable_descriptors, inherited_environment, start_process
from elastic_run.multiprocessing.process.workers import Workers
from elastic_run.multiprocessing.starter import StartedWorker
from elastic_run.records import dataclass
from elastic_run.signals import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.loop import Loop, Timer

#: Bytes of the output that are kept.
_KEPT = 8192
#: Bytes of one read: the size of a pipe.
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class CheckEnd:
    """How a command ended.

    Args:
        exitcode: Its exit code, or minus the number of the signal that ended it.
        is_late: Whether it was killed at the timeout.
        output: The end of its output.
        survivors: Pids that SIGKILL could not end.
    """

    exitcode: int
    is_late: bool
    output: str
    survivors: tuple[int, ...]


class CheckProcess:
    """One run of a command.

    Args:
        loop: The agent's loop.
        context: The state that all rounds of the agent share.
        on_end: Called once, when nothing of it is left, unless it was cancelled.
    """

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

    def start(self, argv: Sequence[str], timeout: float) -> None:
        """Start the command.

        Args:
            argv: The program, looked up in PATH unless it has a slash, and its arguments.
            timeout: Seconds after which it is killed.

        Raises:
            OSError: The system can't execute it.
        """
        guardian = self._context.guardian
        self._context.adopt_orphans()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            env = {**inherited_environment(), contract.ENV_TOKEN: guardian.worker_token}
            pid = start_process(
                argv,
                env,
                stdin=null,
                stdout=writer,
                stderr=writer,
                closed=inheritable_descriptors(),
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
        self._loop.add_reader(self._reader, self._take_piece)
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

    def _take_piece(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Read one piece; return whether there may be more."""
        try:
            piece = os.read(self._reader, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._loop.remove_reader(self._reader)
        self._kept += piece
        del self._kept[:-_KEPT]
        return bool(piece)

    def _on_gone(self, survivors: list[int]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A survivor may go on writing: no more than the pipe can hold is read.
        for _ in range(2 * _PIECE // 4096):
            if not self._read():
                break
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        self.is_running = False
        if self._on_end is not None:
            output = self._kept.decode(errors="replace")
            self._on_end(CheckEnd(self._exitcode, self._is_late, output, tuple(survivors)))
