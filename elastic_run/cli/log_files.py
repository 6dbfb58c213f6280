"""Finds the log files of a run: ``<run directory>/attempt_<n>/<local rank>/{stdout,stderr}.log``.

The directories are named by local ranks. The rank in the job that each had is read from `events.jsonl` beside them, if
that is there and knows as many rounds as there are attempts; otherwise the local rank counts.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from stat import S_ISREG

from elastic_run import contract
from elastic_run.cluster.cpus import list_names
from elastic_run.errors import UsageError
from elastic_run.records import dataclass
from elastic_run.report.event_history import read_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["LogFile", "find_log_files", "find_run_directories", "find_siblings"]

_ATTEMPT = re.compile(rf"{contract.ATTEMPT_DIR_PREFIX}(\d+)(?:\.(\d+))?")
_STREAMS = {contract.STDOUT_LOG: "", contract.STDERR_LOG: "stderr"}
#: Runs that an error names.
_NAMED = 6
#: Characters of a run id that are in a directory's name, at least.
_NAME_LENGTH = 40


@dataclass(frozen=True, slots=True)
class LogFile:
    """One stream of one worker in one attempt.

    Args:
        path: The file.
        attempt: The name of the attempt's directory.
        node: Number of the run directory among the directories that are read.
        rank: The worker's rank.
        stream: An empty string for stdout, or `stderr`.
    """

    path: str
    attempt: str
    node: int
    rank: int
    stream: str


def find_run_directories(path: str) -> list[str]:
    """Return the run directories that a path names: itself, or the only run in it.

    Raises:
        UsageError: The path has no run, or several runs.
    """
    if _list_attempts(path):
        return [path]
    names = sorted(name for name in list_names(path) if _list_attempts(os.path.join(path, name)))
    found = {os.path.realpath(os.path.join(path, name)): name for name in names}
    if not found:
        message = f"{path!r} holds no log files of a run (directories attempt_0, attempt_1 …)"
        raise UsageError(message)
    if len(found) > 1:
        newest = sorted(found, key=_read_change_time, reverse=True)
        shown = ", ".join(os.path.join(path, found[place]) for place in newest[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        message = f"{path!r} has several runs, name one, the newest first: {shown}{more}"
        raise UsageError(message)
    return [os.path.join(path, name) for name in found.values()]


def _read_change_time(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def find_log_files(directories: Iterable[str]) -> list[LogFile]:
    """Return all log files of some run directories: by attempt, then by node and rank."""
    found: list[tuple[tuple[int, int], LogFile]] = []
    for node, directory in enumerate(directories):
        attempts = _list_attempts(directory)
        ranks = _read_ranks(directory)
        for index, (number, name) in enumerate(attempts):
            by_local = ranks[index] if len(ranks) == len(attempts) else {}
            found += [(number, file) for file in _list_files(directory, name, node, by_local)]
    found.sort(key=lambda each: (each[0], each[1].node, each[1].rank, each[1].stream))
    return [file for _, file in found]


def _list_files(directory: str, attempt: str, node: int, ranks: dict[int, int]) -> list[LogFile]:
    files = []
    for name in list_names(os.path.join(directory, attempt)):
        if not name.isdecimal():
            continue
        place = os.path.join(directory, attempt, name)
        rank = ranks.get(int(name), int(name))
        paths = ((os.path.join(place, file), stream) for file, stream in _STREAMS.items())
        # A link leads to the file beside it, which has both streams.
        shown = [pair for pair in paths if os.path.isfile(pair[0]) and not os.path.islink(pair[0])]
        files += [LogFile(path, attempt, node, rank, stream) for path, stream in shown]
    return files


def _list_attempts(directory: str) -> list[tuple[tuple[int, int], str]]:
    """Return the attempts of a run with their numbers, the first one first."""
    matches = ((_ATTEMPT.fullmatch(name), name) for name in list_names(directory))
    return sorted(((int(match[1]), int(match[2] or 0)), name) for match, name in matches if match)


def find_siblings(directory: str, run_id: str) -> list[str]:
    """Return the run directories of other nodes of the same job beside this one, found by their event logs.

    Args:
        directory: The run directory of a node.
        run_id: The job's run id, with which the names of these directories begin. Former jobs may have had the same id.
    """
    jobs = {event.get("job") for event in _read_events(directory, "round_formed")} - {"", None}
    parent = os.path.dirname(directory)
    beginning = f"{run_id.replace('/', '_')[:_NAME_LENGTH]}"
    paths = (os.path.join(parent, name) for name in sorted(list_names(parent)) if name.startswith(beginning))
    return [
        path
        for path in paths
        if path != directory and any(event.get("job") in jobs for event in _read_events(path, "round_formed"))
    ]


def _read_ranks(directory: str) -> list[dict[int, int]]:
    """Return for each round of this node the ranks of its workers by local rank, as far as the event log tells."""
    rounds: dict[object, dict[int, int]] = {}
    try:
        for event in _read_events(directory, "worker_started"):
            rounds.setdefault(event.get("round"), {})[int(event["local_rank"])] = int(event["rank"])
    except (ValueError, KeyError, TypeError):
        return []
    return [*rounds.values()]


def _read_events(directory: str, name: str) -> tuple[dict[str, Any], ...]:
    """Return the events of one name; none where the event log is missing."""
    path = os.path.join(directory, contract.EVENTS_FILE)
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return _read_events_of(path, name, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else ()


@lru_cache(maxsize=256)
def _read_events_of(path: str, name: str, size: int, changed: int) -> tuple[dict[str, Any], ...]:
    """Read them; again only where size or time of the file are others, for `logs -f` looks some times a second."""
    del size, changed
    marker = f'"{name}"'.encode()
    found = []
    try:
        with open(path, "rb") as file:
            for line in read_lines(file):
                if marker in line:
                    with suppress(ValueError, RecursionError):
                        found.append(json.loads(line))
    except OSError:
        return ()
    return tuple(event for event in found if isinstance(event, dict) and event.get("event") == name)
