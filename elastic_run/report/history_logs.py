"""Finds and reads event logs and stacks below a directory; lines that are not events are counted and named.

A log may end in the middle of a line, lack any part, and contain anything: none of that is an error.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from elastic_run.contract import EVENTS_FILE
from elastic_run.files import open_user_file, read_user_file
from elastic_run.records import dataclass, field
from elastic_run.report.event_log import find_mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader

    from elastic_run.report.job_history import Event

#: Bytes that are read of a line at most; no line of an event log is longer.
LINE_LIMIT = 1 << 16


@dataclass(slots=True)
class Mistakes:
    """Lines of a file that are not events."""

    file: str  # Name of the file
    count: int  # Number of such lines
    first_line: int  # Number of the first such line
    reason: str  # Why that line is no event


def read_lines(file: BufferedReader) -> Iterator[bytes]:
    """Return the lines of an event log; a line that is longer than any event is cut."""
    while line := file.readline(LINE_LIMIT + 1):
        yield line
        while len(line) > LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT + 1)


def read_events(lines: Iterable[bytes], file: str) -> tuple[list[Event], Mistakes | None]:
    """Return the events of lines, and the lines that are not events; empty lines don't count."""
    events, mistakes = [], None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        document, reason = _parse(line)
        if not reason:
            events.append(document)
        elif mistakes is None:
            mistakes = Mistakes(file, 1, number, reason)
        else:
            mistakes.count += 1
    return events, mistakes


def _parse(line: bytes) -> tuple[Event, str]:
    if len(line) > LINE_LIMIT:
        return {}, "is longer than any event"
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "is not a whole line of JSON"
    return document, find_mistake(document)


#: Depth of the search below the user's directory: runs, attempts, ranks.
_DEPTH = 3
#: Bytes of an event log that are read, its last ones. A longer log is of years, or a copy of it has a hole.
_LONGEST = 128 << 20
#: Files of stacks that the page shows, and bytes of each.
_STACKS = 20
_STACK_BYTES = 64 * 1024


@dataclass(slots=True)
class Logs:
    """The event logs and stacks of a directory."""

    files: list[str] = field(default_factory=list)  # Paths of the event logs that could be read
    events: list[Event] = field(default_factory=list)  # Their events, file by file
    mistakes: list[Mistakes] = field(default_factory=list)  # Lines that are not events
    problems: list[str] = field(default_factory=list)  # Files that could not be read, or only in part, a clause each
    stacks: list[tuple[str, str]] = field(default_factory=list)  # Path and text of each file of stacks


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
        if size > _LONGEST:
            file.seek(size - _LONGEST)
            next(read_lines(file), None)  # the rest of a line
            logs.problems.append(f"{path} has {size >> 20} MiB: only the last {_LONGEST >> 20} MiB are read")
        events, mistakes = read_events(read_lines(file), path)
    logs.files.append(path)
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
