"""Words that all texts share: exit codes, signals, ranks, durations, exceptions."""

from __future__ import annotations

import re
import signal as signals

from elastic_run.contract import EXIT_HUNG, EXIT_SIGNAL_BASE, HANG
from elastic_run.core.job.ranks import list_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd

#: The place in C++ code that gloo and NCCL put before their messages.
_CPP_PLACE = re.compile(r"^\[/?\S+\.\w+:\d+\] ")
_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def signal_name(number: int) -> str:
    """Return a signal's name.

    Returns:
        `SIGTERM`, `SIGRTMIN+3`, or `signal 99` where there is no such signal.
    """
    try:
        return signals.Signals(number).name
    except ValueError:
        offset = number - int(getattr(signals, "SIGRTMIN", 1000))
        last = int(getattr(signals, "SIGRTMAX", 0)) - int(getattr(signals, "SIGRTMIN", 0))
        return f"SIGRTMIN+{offset}" if 0 < offset < last else f"signal {number}"


def exit_text(end: WorkerEnd) -> str:
    """Say how a worker ended.

    Returns:
        `exit code 1`, `SIGKILL`, or `exit code 137 (128+9: SIGKILL)`.
    """
    if end.exitcode < 0:
        return signal_name(-end.exitcode)
    if end.signal is None:
        return f"exit code {end.exitcode}"
    return f"exit code {end.exitcode} ({EXIT_SIGNAL_BASE}+{end.signal}: {signal_name(end.signal)})"


def end_verb(end: WorkerEnd) -> str:
    """Return the verb that follows a worker's name: how it ended.

    Returns:
        `was killed by SIGSEGV`, `failed with exit code 1`, or `made no progress`.
    """
    if is_hang(end):
        return "made no progress"
    return f"was killed by {exit_text(end)}" if end.exitcode < 0 else f"failed with {exit_text(end)}"


def is_hang(end: WorkerEnd) -> bool:
    """Whether the launcher stopped a worker for a hang; a worker may choose the same exit code."""
    return end.exitcode == EXIT_HUNG and end.exception is not None and end.exception.type == HANG


def no_restart_left(max_restarts: int) -> str:
    """Say why the job ends where --hang-action asks for a restart.

    Args:
        max_restarts: Restarts that the whole job may make.
    """
    return f"no restart is left for --hang-action=restart (--max-restarts={max_restarts})"


def exception_line(exception: ExceptionText) -> str:
    """Return an exception in one line: its type, and the first line of the message that is not empty."""
    first = next((line.strip() for line in exception.message.splitlines() if line.strip()), "")
    first = _CPP_PLACE.sub("", first, count=1)
    return f"{exception.type}: {first}" if first else exception.type


def span(seconds: float) -> str:
    """Return a span of time, rounded to the precision that a reader needs.

    Returns:
        `0.03 s`, `12.3 s`, `4 min 02 s`, `3 h 07 min`, or `2 d 4 h`.
    """
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def ranks(numbers: Iterable[int]) -> str:
    """Return a list of ranks with consecutive ranks as ranges.

    Returns:
        `rank 3`, `ranks 0-2, 4, 6-7`, or `ranks 0, 2, 4, ... (50 in all)`.
    """
    ordered = sorted(numbers)
    return f"rank{'s' if len(ordered) > 1 else ''} {list_ranks(ordered)}"


def count(number: int, noun: str) -> str:
    """Return a number and its noun.

    Returns:
        `1 worker` or `8 workers`.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
