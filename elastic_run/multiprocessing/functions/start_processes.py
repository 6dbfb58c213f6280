"""`start_processes`, and the two contexts that it returns: functions and commands.

Names, signatures and results are torch 2.13's (torch.distributed.elastic.multiprocessing). Different on purpose: if a
function worker ends with exit code 0 without having returned, its result is None; torch waits for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess

from elastic_run.multiprocessing.functions.contexts import GroupContext, validate_full_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.functions.contexts import PContext
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.multiprocessing.functions.process_group import ProcessGroup
    from elastic_run.multiprocessing.output.logs import LogsSpecs
    from elastic_run.multiprocessing.starter import StartedWorker, WorkerStarter


class MultiprocessContext(GroupContext):
    """Processes that call a function."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self.start_method = start_method
        self._numa_options = numa_options
        self._functions: Functions | None = None

    def _prepare(self) -> None:
        from elastic_run.multiprocessing.functions.launch import Functions

        entrypoint: Any = self.entrypoint
        self._functions = Functions(entrypoint, self.args, self.start_method)

    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        if self._functions is None:
            message = f"{self.name} was not prepared"
            raise AssertionError(message)

        def give_up() -> None:
            group.abandon()
            self._reset_signals()

        if not group.pids:
            group.at_end(self._functions.close)
        return starter.start_function(self._functions, local_rank, self._environments[local_rank], on_fork=give_up)

    def _values(self, group: ProcessGroup) -> dict[int, Any]:
        from elastic_run.multiprocessing.functions.launch import read_value

        return {rank: read_value(group.results[rank], rank) for rank in sorted(group.pids)}


class SubprocessContext(GroupContext):
    """Processes that run a command.

    Attributes:
        subprocess_handlers: The processes that were started, by local rank.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self._numa_options = numa_options
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}

    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        args: Any = self.args[local_rank]  # ("file") is a text, not a tuple, and torch's documentation has it
        argv = [str(self.entrypoint), *map(str, args if isinstance(args, tuple | list) else (args,))]
        started = starter.start_command(local_rank, argv, self._environments[local_rank])
        self.subprocess_handlers[local_rank] = SubprocessHandler(group, local_rank, started.pid, tuple(argv))
        return started

    def _blamed(self, group: ProcessGroup, failed: list[int]) -> list[int]:
        """Return the ranks that count as failed: after a failure the stopped processes count too, as with torch."""
        return [rank for rank, code in group.ended.items() if code] if failed else []

    def _values(self, group: ProcessGroup) -> dict[int, Any]:
        return dict.fromkeys(sorted(group.pids))


class StartedProcess:
    """A process of `SubprocessContext` with the names of `subprocess.Popen`.

    The group's thread waits for the process, so this object asks the group instead of the kernel.
    """

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...]) -> None:
        self._group = group
        self._local_rank = local_rank
        self.args = args
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended the process, or None while it runs."""
        return self._group.ended.get(self._local_rank)

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        self._group.wait(lambda: self.returncode is not None, timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class SubprocessHandler:
    """A process and its local rank."""

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...]) -> None:
        self.local_rank_id = local_rank
        self.proc = StartedProcess(group, local_rank, pid, args)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the process and its group, unless it has ended."""
        if self.proc.returncode is None:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def start_processes(  # noqa: PLR0913, PLR0917 - torch's signature
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start a process for each entry of `args`.

    Args:
        name: Name of the processes in the prefix of tee'd lines.
        entrypoint: A function, or a command.
        args: Arguments by local rank, from 0; arguments of a command are converted to strings.
        envs: Environment variables by local rank, in addition to this process's own.
        logs_specs: The files for their output.
        log_line_prefixes: Prefix of tee'd lines by local rank; None for name and local rank.
        start_method: `start_process`, `fork` or `forkserver`; nothing to a command.
        numa_options: How processes are bound to CPUs, or None.
        duplicate_stdout_filters: Copy tee'd stdout lines that hold one of these into one file.
        duplicate_stderr_filters: The same for stderr.

    Returns:
        The started processes; call `close` when done.

    Raises:
        RuntimeError: A map doesn't have all local ranks, or there are none.
        ValueError: There is no entrypoint, or a variable can't be one.
        TypeError: A variable is no text.
        OSError: A process can't be started; none runs then.
        Exception: The function or an argument can't be sent; see `functions.Functions`.
    """
    if not args:
        message = "args is empty: it needs the arguments of at least one process, {0: ()}"
        raise RuntimeError(message)
    validate_full_rank(args, len(args), "args")
    validate_full_rank(envs, len(args), "envs")
    if not entrypoint and isinstance(entrypoint, str):
        message = "entrypoint is empty: it needs a function or a command"
        raise ValueError(message)
    common = (log_line_prefixes, numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, *common)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, logs_specs, *common)
    try:
        context.start()
    except BaseException:
        context.close(signal.SIGKILL, timeout=0)
        raise
    return context
