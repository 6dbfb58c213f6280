"""`elastic_run.spawn`: a function in several processes of this node, in the manner of torch.multiprocessing.spawn.

There are no ranks, no rendezvous and no restarts: `fn(index, *args)` runs `nprocs` times. Different from torch's: torch
is not imported, each process leads a session, all processes that it starts end with it, no process outlives this
program, and `start_method` counts.

Source of the names and of their meaning: torch 2.13, torch.multiprocessing.spawn.
"""

from __future__ import annotations

import signal

from elastic_run.multiprocessing.functions.launch import Functions
from elastic_run.multiprocessing.functions.process_group import GroupProcess, HeldSignals, ProcessGroup
from elastic_run.multiprocessing.starter import WorkerStarter
from elastic_run.multiprocessing.wiring import Wiring
from elastic_run.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Seconds that processes get to stop when another one has failed.
_GRACE = 30.0


class ProcessException(Exception):  # noqa: N818 - torch's name
    """A process failed."""

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[type[ProcessException], tuple[Any, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A process's function raised an exception; its traceback is in the message."""


class ProcessExitedException(ProcessException):
    """A process ended by a signal, or with an exit code: `exit_code` is minus the signal's number then."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[type[ProcessException], tuple[Any, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


class ProcessContext:
    """Processes that run."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._joined: set[int] = set()
        self.processes = [GroupProcess(group, index, pid) for index, pid in sorted(group.pids.items())]

    def pids(self) -> list[int]:
        """Return their pids, by index."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until another process has ended; when one failed, stop the others and raise.

        Args:
            timeout: Seconds, or None for any time.
            grace_period: Seconds in which the others may end by themselves when one has failed, and then those
                until SIGKILL; None for none, and 30.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException: A function raised an exception.
            ProcessExitedException: A process ended by a signal or with another exit code than 0.
        """
        group = self._group
        count = len(self._joined)
        if count < len(self.processes):
            group.wait(lambda: len(group.ended) > count, timeout)
        # In the order of their ends: the first to fail is the cause.
        for index, code in tuple(group.ended.items()):
            if code and index not in self._joined:
                group.wait(lambda: len(group.ended) == len(self.processes), grace_period or 0.0)
                group.stop(signal.SIGTERM, _GRACE if grace_period is None else grace_period)
                self._joined.update(range(len(self.processes)))
                raise self._failure(index, code)
            self._joined.add(index)
        if len(self._joined) < len(self.processes):
            return False
        group.stop()
        return True

    def _failure(self, index: int, code: int) -> ProcessException:
        pid = self.processes[index].pid
        if trace := self._group.functions[index].traceback:
            return ProcessRaisedException(f"\n\nprocess {index} raised an exception:\n{trace}", index, pid)
        if code >= 0:
            return ProcessExitedException(f"process {index} terminated with exit code {code}", index, pid, code)
        name = signal_name(-code)
        return ProcessExitedException(f"process {index} terminated with signal {name}", index, pid, code, name)

    def stop(self, number: int = signal.SIGTERM, grace: float = _GRACE) -> None:
        """Stop all of them with all that they started, and wait until they are gone; harmless when they are.

        They get the signal first, and SIGKILL after the seconds of grace.
        """
        self._group.stop(number, grace)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` processes.

    Args:
        fn: The function; with `spawn` and `forkserver` defined at the top level of a module.
        args: Its arguments after the index.
        nprocs: Number of processes.
        join: Whether to wait until all have ended.
        daemon: Whether the program may end before them, which ends them; if not it waits for them at its end.
        start_method: `spawn`, `fork` or `forkserver`.

    Returns:
        None after joining, else the running processes.

    Raises:
        ValueError: `nprocs` is below 1, or there is no such start method.
        ProcessRaisedException: A function raised an exception; the other processes are stopped.
        ProcessExitedException: A process ended by a signal or with another exit code than 0; the others are stopped.
        Exception: The function or an argument can't be sent; see `functions.Functions`.
    """
    if nprocs < 1:
        message = f"nprocs must be at least 1, got {nprocs}"
        raise ValueError(message)
    calls = {index: (index, *args) for index in range(nprocs)}
    functions = Functions(fn, calls, start_method, is_recorded=False, daemon=daemon)
    interrupts = HeldSignals((signal.SIGINT,))
    context = None
    try:
        with interrupts:
            context = ProcessContext(_start(functions, nprocs, is_daemon=daemon, on_fork=interrupts.leave))
        while join and not context.join():
            pass
    except ProcessException:
        raise
    except BaseException as error:
        if context is not None:
            # Ctrl-C goes to the terminal's processes only, and these have sessions of their own.
            context.stop(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    return None if join else context


def _start(functions: Functions, nprocs: int, *, is_daemon: bool, on_fork: Callable[[], None]) -> ProcessGroup:
    group = ProcessGroup(is_daemon=is_daemon)

    def leave() -> None:
        group.abandon()
        on_fork()

    group.at_end(functions.close)
    starter = WorkerStarter(group.guardian, Wiring(capture=False))
    try:
        group.start(nprocs, lambda index: starter.start_function(functions, index, {}, on_fork=leave))
    except BaseException:
        group.stop(signal.SIGKILL, 0.0)
        raise
    return group
