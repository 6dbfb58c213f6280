"""`start_processes`, and the contexts that it returns: for agents that a user writes.

Names, signatures and results are torch 2.13's (torch.distributed.elastic.multiprocessing). Different on purpose
- No context polls: `wait` of our contexts waits for an exit, and `period` has no effect.
- If a function worker ends with exit code 0 without having returned, its result is None; torch waits for ever.
- `close` restores the signal handlers that `start` has replaced (in the main thread only).

Each process leads a session; `close` stops all processes of the session, and none outlives this program. Their stdout
and stderr are this program's own unless `logs_specs` says otherwise; the group's thread passes on tee'd lines.
"""

from __future__ import annotations

import abc
import os
import signal
import time
from dataclasses import dataclass, field

from elastic_run import contract
from elastic_run.multiprocessing.api import SignalException
from elastic_run.multiprocessing.errors import ProcessFailure
from elastic_run.multiprocessing.fork_exec import ensure_standard_descriptors, own_interpreter
from elastic_run.multiprocessing.functions.process_group import GroupProcess, HeldSignals, ProcessGroup
from elastic_run.multiprocessing.logs import check_logs
from elastic_run.multiprocessing.starter import WorkerStarter
from elastic_run.multiprocessing.wiring import Wiring, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, TextIO

    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.multiprocessing.logs import LogsDest, LogsSpecs
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds that processes get to stop when one of them has failed, as with torch.
_GRACE = 30


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
        start_method: `spawn`, `fork` or `forkserver`; a command ignores it.
        numa_options: How processes are bound to CPUs, or None.
        duplicate_stdout_filters: Copy tee'd stdout lines that hold one of these into one file.
        duplicate_stderr_filters: The same for stderr.

    Returns:
        The started processes; call `close` when done.

    Raises:
        RuntimeError: A map doesn't have all local ranks, or there are none.
        ValueError: There is no entrypoint.
        OSError: A process can't be started; none runs then.
        Exception: The function or an argument can't be sent; see `functions.Functions`.
    """
    if not args:
        message = "args is empty: it needs the arguments of at least one process, {0: ()}"
        raise RuntimeError(message)
    for what, mapping in (("args", args), ("envs", envs)):
        if set(mapping) != set(range(len(args))):
            wanted, got = (", ".join(map(str, ranks)) or "none" for ranks in (range(len(args)), mapping))
            message = f"{what} must have the local ranks {wanted}, got {got}"
            raise RuntimeError(message)
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


@dataclass
class RunProcsResult:
    """The results and failures of the processes, by local rank.

    Args:
        return_values: Return values of functions; None for commands.
        failures: The failures.
        stdouts: Paths of redirected stdout, or "".
        stderrs: Paths of redirected stderr, or "".
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether one has failed."""
        return bool(self.failures)


class PContext(abc.ABC):
    """Processes that are started, waited for and stopped together.

    Args:
        name: Name of the processes in the prefix of tee'd lines.
        entrypoint: A function or a command.
        args: Arguments by local rank.
        envs: Environment variables by local rank, in addition to this process's own.
        logs_specs: The files for their output.
        log_line_prefixes: Prefix of tee'd lines by local rank; None for name and local rank.
        duplicate_stdout_filters: Copy tee'd stdout lines that hold one of these into one file.
        duplicate_stderr_filters: The same for stderr.

    Raises:
        LogsPluginError: The logs specs has left out a local rank.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        logs = logs_specs.reify(envs)
        check_logs(logs_specs, logs, range(self.nprocs))
        self.stdouts, self.stderrs, self.error_files = logs.stdouts, logs.stderrs, logs.error_files
        self._logs = logs
        self._logs_specs = logs_specs
        self._prefixes = log_line_prefixes
        self._filters = (duplicate_stdout_filters or [], duplicate_stderr_filters or [])
        #: Files into which chosen lines are copied, open for writing at their end; None without filters.
        self.filtered_stdout = _open_filtered(logs, "filtered_stdout") if duplicate_stdout_filters else None
        self.filtered_stderr = _open_filtered(logs, "filtered_stderr") if duplicate_stderr_filters else None
        # Not during a start: processes that are not registered yet would go on.
        self._signals = HeldSignals(_stop_signals(), then=_raise_signal_exception)

    def start(self) -> None:
        """Start the processes; in the main thread, let stop signals raise `SignalException` from now on."""
        with self._signals:
            self._start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have ended or one has failed; the others are stopped then.

        Args:
            timeout: Seconds; 0 only looks, below 0 waits for any time.
            period: Seconds between two looks, of a subclass that has nothing to wait on. Ours has.

        Returns:
            The result, or None where they still run.

        Raises:
            SignalException: A stop signal came; call `close` with it.
        """
        end = None if timeout < 0 else time.monotonic() + timeout
        while (result := self._poll()) is None and (end is None or time.monotonic() < end):
            time.sleep(period if end is None else max(0.0, min(period, end - time.monotonic())))
        return result

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """Return the result if all have ended or one has failed, else None; don't wait."""

    @abc.abstractmethod
    def pids(self) -> dict[int, int]:
        """Return the processes by local rank."""

    @abc.abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Stop the processes, and free their resources."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop the processes, and free their resources; harmless when closed.

        Args:
            death_sig: The signal that they get first; None for SIGTERM.
            timeout: Seconds until SIGKILL.
        """
        self._close(death_sig or signal.SIGTERM, timeout)
        for file in (self.filtered_stdout, self.filtered_stderr):
            if file is not None:
                file.close()
        self._signals.restore()


def _open_filtered(logs: LogsDest, name: str) -> TextIO | None:
    path = getattr(logs, name, "")  # the class of torch 2.8 has no such fields
    return (
        open(path, "a", buffering=1, errors="replace", encoding="utf-8", opener=lambda name, _: open_log(name))
        if path
        else None
    )


def _stop_signals() -> list[int]:
    names = os.environ.get(contract.ENV_SIGNALS_TO_HANDLE, contract.DEFAULT_SIGNALS_TO_HANDLE)
    numbers = (getattr(signal, name.strip(), None) for name in names.split(","))
    return [number for number in numbers if isinstance(number, signal.Signals)]


def _raise_signal_exception(number: int, _frame: FrameType | None) -> None:
    name = signal.Signals(number)
    message = f"Process {os.getpid()} got signal: {number} ({name.name})"
    raise SignalException(message, name)


class GroupContext(PContext):
    """A `PContext` whose processes belong to a process group."""

    _group: ProcessGroup | None = None
    _functions: Functions | None = None
    _result: RunProcsResult | None = None
    _numa_options: NumaOptions | None = None

    def pids(self) -> dict[int, int]:
        """Return the processes by local rank."""
        return {} if self._group is None else self._group.pids

    def _start(self) -> None:
        if self._group is not None:
            message = f"{self.name} was started already: a context starts its processes once"
            raise ValueError(message)
        ensure_standard_descriptors()
        wiring, group = Wiring(capture=False), ProcessGroup()
        self._group = group
        if self._functions is not None:
            group.at_end(self._functions.close)
        affinities: dict[int, frozenset[int]] = {}
        if self._numa_options is not None:
            from elastic_run.cluster.numa import worker_affinities

            affinities = worker_affinities(self._numa_options, self.nprocs, python=own_interpreter())
        starter = WorkerStarter(group.guardian, wiring, self._logs, affinities)
        group.start(
            self.nprocs,
            lambda rank: self._launch(starter, group, rank),
            before_watch=lambda: self._listen(group, wiring),
        )

    def _listen(self, group: ProcessGroup, wiring: Wiring) -> None:
        if not any(wiring.lines.values()):
            return
        from elastic_run.multiprocessing.output.console import Console
        from elastic_run.multiprocessing.output.worker_output import WorkerOutput

        console = Console(group.loop)
        output = WorkerOutput(group.loop, console, wiring)
        output.open_filtered(self._logs, *self._filters)
        prefixes = self._prefixes or {rank: f"[{self.name}{rank}]:" for rank in range(self.nprocs)}
        output.attach(lambda rank: prefixes.get(rank, ""))

        def finish() -> None:
            output.close()
            group.loop.run_until(lambda: console.is_idle)  # there may be a slow reader of the tee'd lines
            console.close()

        group.at_end(finish)

    @abc.abstractmethod
    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        """Start one process."""

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002 - nothing is polled
        """Wait until all processes have ended or one has failed; see `PContext.wait`."""
        if (group := self._group) is not None:
            group.wait(lambda: group.is_decided, None if timeout < 0 else timeout)
        return self._poll()

    def _poll(self) -> RunProcsResult | None:
        group = self._group
        if group is None:
            message = f"{self.name} was not started"
            raise AssertionError(message)
        if self._result is None and group.is_decided:
            failed = [rank for rank, code in group.ended.items() if code]
            group.stop(signal.SIGTERM, _GRACE)
            result = self._result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
            for rank in self._blamed(group, failed):
                path = self.error_files.get(rank, "")
                result.failures[rank] = ProcessFailure(rank, group.pids[rank], group.ended[rank], path)
            if not result.failures:
                functions = group.functions
                result.return_values = {
                    rank: functions[rank].read_value(rank) if rank in functions else None for rank in sorted(group.pids)
                }
                if cleanup := getattr(self._logs_specs, "cleanup", None):
                    cleanup()
        return self._result

    def _blamed(self, group: ProcessGroup, failed: list[int]) -> list[int]:
        """Return the ranks that count as failed: the processes that failed before the others were stopped."""
        own = [rank for rank, code in group.ended.items() if code and rank not in group.stopped]
        return own or failed

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._group is not None:
            self._group.stop(death_sig, timeout)


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
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self.start_method = start_method
        self._numa_options = numa_options

    def _start(self) -> None:
        from elastic_run.multiprocessing.functions.launch import Functions

        entrypoint: Any = self.entrypoint
        if self._group is None:
            self._functions = Functions(entrypoint, self.args, self.start_method)
        super()._start()

    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        functions: Any = self._functions

        def give_up() -> None:
            group.abandon()
            self._signals.leave()

        return starter.start_function(functions, local_rank, self.envs[local_rank], on_fork=give_up)


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
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._numa_options = numa_options
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}

    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        args: Any = self.args[local_rank]  # ("file") is a text, not a tuple, and torch's documentation has it
        argv = [str(self.entrypoint), *map(str, args if isinstance(args, tuple | list) else (args,))]
        started = starter.start_command(local_rank, argv, self.envs[local_rank])
        self.subprocess_handlers[local_rank] = SubprocessHandler(group, local_rank, started.pid, tuple(argv))
        return started

    def _blamed(self, group: ProcessGroup, failed: list[int]) -> list[int]:
        """Return the ranks that count as failed: after a failure the stopped processes count too, as with torch."""
        return [rank for rank, code in group.ended.items() if code] if failed else []


class SubprocessHandler:
    """A process and its local rank."""

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...]) -> None:
        self.local_rank_id = local_rank
        self.proc = GroupProcess(group, local_rank, pid, args)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the process and its group, unless it has ended."""
        if self.proc.returncode is None:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
