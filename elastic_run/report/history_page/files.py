"""Finds and reads event logs and stacks below a directory; lines that are not events are counted and named.

A log may be longer than can be read in seconds: it is of years, or a copy of it has a hole of gigabytes. Its beginning
and its end are read then.
"""

from __future__ import annotations

import errno
import math
import os
import stat

from elastic_run.contract import EVENTS_FILE
from elastic_run.records import dataclass, field
from elastic_run.report.event_history import Mistakes, read_events, read_lines
from elastic_run.user_file import open_user_file, read_user_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_run.report.job_history import Event

#: Depth of the search below the user's directory: runs, attempts, ranks.
_DEPTH = 3
#: Bytes of the beginning, and of the end, of an event log that are read.
_PART = 64 << 20
#: Files of stacks that the page shows, and bytes of each.
_STACKS = 20
_STACK_BYTES = 64 * 1024


@dataclass(slots=True)
class Logs:
    """The event logs and stacks of a directory.

    Args:
        files: Paths of the event logs that could be read.
        events: Their events, file by file.
        mistakes: Lines that are not events.
        problems: Files that could not be read, or only in part, a clause each.
        stacks: Path and text of each file of stacks.
    """

    files: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    mistakes: list[Mistakes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stacks: list[tuple[str, str]] = field(default_factory=list)


def read_logs(place: str) -> Logs:
    """Read an event log, or all below a directory.

    Raises:
        OSError: The place isn't there, or may not be read.
    """
    logs = Logs()
    if not os.path.isdir(place):
        _check_kind(place, allows_pipe=True)  # as the shell's <(command)
        _read_events(place, logs)
        return logs
    os.listdir(place)
    for path in sorted(_find_files(place, 0)):
        name = os.path.basename(path)
        if name == EVENTS_FILE:
            _read_log(path, logs)
        elif len(logs.stacks) < _STACKS:
            _read_stacks(path, logs)
    return logs


def _find_files(directory: str, depth: int) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth < _DEPTH:
                yield from _find_files(entry.path, depth + 1)
        elif entry.name == EVENTS_FILE or (entry.name.startswith("stacks") and entry.name.endswith(".txt")):
            yield entry.path


def _read_log(path: str, logs: Logs) -> None:
    try:
        _check_kind(path)
        _read_events(path, logs)
    except OSError as error:
        logs.problems.append(f"{path} can't be read: {error.strerror}")


def _check_kind(path: str, *, allows_pipe: bool = False) -> None:
    """Raise OSError for a device, which may have no end, and for a pipe that the user has not named."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (allows_pipe and stat.S_ISFIFO(mode))):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _read_events(path: str, logs: Logs) -> None:
    with open_user_file(path) as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe 0
        is_long = size > 2 * _PART
        _take_events(read_lines(file, _PART if is_long else math.inf), path, logs)
        if is_long:
            start = file.seek(size - _PART)
            last = read_lines(file)
            next(last, None)  # the rest of a line
            _take_events(last, f"{path}, from byte {start} on", logs)
            part = _PART >> 20
            logs.problems.append(f"{path} has {size >> 20} MiB: only its first and last {part} MiB are read")
    logs.files.append(path)


def _take_events(lines: Iterator[bytes], name: str, logs: Logs) -> None:
    events, mistakes = read_events(lines, name)
    logs.events += events
    if mistakes is not None:
        logs.mistakes.append(mistakes)


def _read_stacks(path: str, logs: Logs) -> None:
    try:
        _check_kind(path)
        data = read_user_file(path, _STACK_BYTES + 1)
    except OSError as error:
        logs.problems.append(f"{path} can't be read: {error.strerror}")
        return
    cut = "\n..." if len(data) > _STACK_BYTES else ""
    logs.stacks.append((path, data[:_STACK_BYTES].decode(errors="replace") + cut))
