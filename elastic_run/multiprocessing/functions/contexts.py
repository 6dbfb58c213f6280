"""Processes that are started, waited for and stopped together: the base class of torch's process contexts.

Names, signatures and results are torch 2.13's (torch.distributed.elastic.multiprocessing). Different on purpose:
`close` restores the signal handlers that `start` has replaced (in the main thread only).
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
from elastic_run.multiprocessing.functions.process_group import HeldSignals
from elastic_run.multiprocessing.output.logs import check_logs
from elastic_run.multiprocessing.output.wiring import open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, TextIO

    from elastic_run.multiprocessing.errors import ProcessFailure
    from elastic_run.multiprocessing.output.logs import LogsDest, LogsSpecs


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
        self._previous_handlers: dict[int, Any] = {}

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
        for file in (self.filtered_stdout, self.filtered_stderr):
            if file is not None:
                file.close()
        self._return_signals()


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


def raise_signal_exception(number: int, _frame: FrameType | None) -> None:
    """Answer a stop signal by an exception in the main thread."""
    name = signal.Signals(number)
    message = f"Process {os.getpid()} got signal: {number} ({name.name})"
    raise SignalException(message, name)
