"""Processes that are started together, for agents that a user writes: torch's process context and its result.

Names, signatures and results are torch 2.13's (torch.distributed.elastic.multiprocessing). Two things differ on purpose
- No context polls: `wait` of our contexts (`start_processes`) waits for an exit, and `period` has no effect.
- `close` restores the signal handlers that `start` has replaced (in the main thread only).

Each process leads a session; `close` stops all processes of the session, and none outlives this program. Their stdout
and stderr are this program's own unless `logs_specs` says otherwise; the group's thread passes on tee'd lines.
"""

from __future__ import annotations

import abc
import os
import signal
import threading
import time
from dataclasses import dataclass, field

from elastic_run import contract
from elastic_run.multiprocessing.api import SignalException
from elastic_run.multiprocessing.errors import ProcessFailure
from elastic_run.multiprocessing.functions.process_group import HeldSignals, ProcessGroup
from elastic_run.multiprocessing.output.logs import check_logs
from elastic_run.multiprocessing.output.wiring import Wiring, open_log
from elastic_run.multiprocessing.process.fork_exec import ensure_standard_descriptors
from elastic_run.multiprocessing.starter import WorkerStarter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Any, TextIO

    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.output.logs import LogsSpecs
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds that processes get to stop when one of them has failed, as with torch.
_GRACE = 30


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


def validate_full_rank(mapping: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Refuse a map whose keys are not exactly the local ranks.

    Raises:
        RuntimeError: Ranks are missing, or there are others.
    """
    if set(mapping) != set(range(nprocs)):
        message = f"{what} must have the local ranks {_ranks(range(nprocs))}, got {_ranks(mapping)}"
        raise RuntimeError(message)


def _ranks(ranks: Any) -> str:
    return ", ".join(map(str, ranks)) or "none"


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
        RuntimeError: A map doesn't have all local ranks. It is a LogsPluginError where the logs specs has left one out.
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
        validate_full_rank(logs.stdouts, self.nprocs, "the logs' stdouts")
        validate_full_rank(logs.stderrs, self.nprocs, "the logs' stderrs")
        self.stdouts, self.stderrs, self.error_files = logs.stdouts, logs.stderrs, logs.error_files
        self._logs = logs
        self._logs_specs = logs_specs
        self._prefixes = log_line_prefixes
        self._filters = (duplicate_stdout_filters or [], duplicate_stderr_filters or [])
        self._previous_handlers: dict[int, Any] = {}
        self._filtered: dict[str, TextIO] = {}

    @property
    def filtered_stdout(self) -> TextIO | None:
        """The file into which chosen lines of stdout are copied, open for writing at its end; None without filters."""
        return self._open_filtered("filtered_stdout") if self._filters[0] else None

    @property
    def filtered_stderr(self) -> TextIO | None:
        """The same for stderr."""
        return self._open_filtered("filtered_stderr") if self._filters[1] else None

    def _open_filtered(self, name: str) -> TextIO | None:
        path = getattr(self._logs, name, "")  # the class of torch 2.8 has no such fields
        if path and path not in self._filtered:
            self._filtered[path] = open(  # noqa: SIM115 - closed at the end
                path, "a", buffering=1, errors="replace", encoding="utf-8", opener=lambda name, _: open_log(name)
            )
        return self._filtered.get(path)

    def _close_filtered(self) -> None:
        for file in self._filtered.values():
            file.close()

    def start(self) -> None:
        """Start the processes; in the main thread, let stop signals raise `SignalException` from now on."""
        # Not during a start: processes that are not registered yet would go on.
        held = HeldSignals(_stop_signals())
        held.hold()
        self._previous_handlers = held.handlers
        try:
            self._start()
        except BaseException:
            held.release()
            raise
        for number in held.handlers:
            signal.signal(number, raise_signal_exception)
        held.deliver()

    def _return_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) is raise_signal_exception:
                signal.signal(number, previous)
        self._previous_handlers.clear()

    def _reset_signals(self) -> None:
        """In a forked worker: a stop signal is answered as it was before, not by the launcher's exception."""
        for number, previous in self._previous_handlers.items():
            is_agent = previous is raise_signal_exception
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default if is_agent else previous)

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
        while True:
            result = self._poll()
            left = None if end is None else end - time.monotonic()
            if result is not None or (left is not None and left <= 0):
                return result
            self._wait_news(left, period)

    def _wait_news(self, timeout: float | None, period: float) -> None:
        """Wait until another `_poll` is worth while."""
        time.sleep(period if timeout is None else min(period, timeout))

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
        self._close_filtered()
        self._return_signals()


class GroupContext(PContext):
    """A `PContext` whose processes belong to a process group."""

    _group: ProcessGroup | None = None
    _is_started = False
    _environments: dict[int, dict[str, str]]
    _result: RunProcsResult | None = None
    _numa_options: NumaOptions | None = None

    def pids(self) -> dict[int, int]:
        """Return the processes by local rank."""
        return {} if self._group is None else self._group.pids

    def _start(self) -> None:
        if self._is_started:
            message = f"{self.name} was started already: a context starts its processes once"
            raise ValueError(message)
        self._is_started = True
        self._environments = {rank: _read_environment(env, rank) for rank, env in self.envs.items()}
        self._prepare()
        ensure_standard_descriptors()
        wiring, group = Wiring(capture=False), ProcessGroup(say=self._say)
        self._group = group
        try:
            self._start_all(group, wiring)
        finally:
            # After any error: the processes that run by now are stopped through it.
            group.serve()

    def _start_all(self, group: ProcessGroup, wiring: Wiring) -> None:
        starter = WorkerStarter(group.guardian, wiring, self._logs, self._affinities())
        try:
            group.start_guardian()
            for rank in range(self.nprocs):
                group.adopt(rank, self._launch(starter, group, rank))
        finally:
            self._listen(group, wiring)

    def _affinities(self) -> dict[int, frozenset[int]]:
        if self._numa_options is None:
            return {}
        from elastic_run.cluster.numa import worker_affinities
        from elastic_run.multiprocessing.process.interpreter import own_interpreter

        return worker_affinities(self._numa_options, self.nprocs, python=own_interpreter())

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

    @staticmethod
    def _say(text: str) -> None:
        import logging

        logging.getLogger(__name__).warning("%s", text)

    def _prepare(self) -> None:
        """Refuse functions and arguments that can't be started, before the first process starts."""

    @abc.abstractmethod
    def _launch(self, starter: WorkerStarter, group: ProcessGroup, local_rank: int) -> StartedWorker:
        """Start one process."""

    def _wait_news(self, timeout: float | None, period: float) -> None:  # noqa: ARG002 - nothing is looked at
        group = self._group
        if group is not None:
            group.wait(lambda: group.is_decided, timeout)

    def _poll(self) -> RunProcsResult | None:
        group = self._group
        if group is None:
            message = f"{self.name} was not started"
            raise AssertionError(message)
        if self._result is None and group.is_decided:
            failed_first = [rank for rank, code in group.ended.items() if code]
            group.stop(signal.SIGTERM, _GRACE)
            self._result = self._conclude(group, failed_first)
            cleanup = getattr(self._logs_specs, "cleanup", None)
            if not self._result.failures and cleanup is not None:
                cleanup()
        return self._result

    def _conclude(self, group: ProcessGroup, failed: list[int]) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank in self._blamed(group, failed):
            result.failures[rank] = ProcessFailure(
                rank, group.pids[rank], group.ended[rank], self.error_files.get(rank, "")
            )
        if not result.failures:
            result.return_values = self._values(group)
        return result

    def _blamed(self, group: ProcessGroup, failed: list[int]) -> list[int]:
        """Return the ranks that count as failed: the processes that failed before the others were stopped."""
        own = [rank for rank, code in group.ended.items() if code and rank not in group.stopped]
        return own or failed

    @abc.abstractmethod
    def _values(self, group: ProcessGroup) -> dict[int, Any]:
        """Return the values that the processes returned."""

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._group is not None:
            self._group.stop(death_sig, timeout)


def _read_environment(env: dict[str, Any], rank: int) -> dict[str, str]:
    """Return a process's variables as text.

    Raises:
        TypeError: One is none, such as a number.
        ValueError: The kernel takes no variable of that name or value.
    """
    found = {}
    for name, value in env.items():
        try:
            key, text = os.fsdecode(name), os.fsdecode(value)
        except TypeError:
            message = f"envs of local rank {rank}: names and values are texts, got {name!r}: {value!r}"
            raise TypeError(message) from None
        if not key or "=" in key or "\0" in key + text:
            message = f"envs of local rank {rank}: {name!r}: {value!r} can't be an environment variable"
            raise ValueError(message)
        found[key] = text
    return found


def _stop_signals() -> list[int]:
    names = os.environ.get(contract.ENV_SIGNALS_TO_HANDLE, contract.DEFAULT_SIGNALS_TO_HANDLE)
    numbers = (getattr(signal, name.strip(), None) for name in names.split(","))
    return [number for number in numbers if isinstance(number, signal.Signals)]


def raise_signal_exception(number: int, _frame: FrameType | None) -> None:
    """Answer a stop signal by an exception in the main thread."""
    name = signal.Signals(number)
    message = f"Process {os.getpid()} got signal: {number} ({name.name})"
    raise SignalException(message, name)
