"""``elastic-run logs [RUN]``: the log files of a job that runs or has ended, across its attempts.

Log files have no times, so they are shown attempt by attempt and rank by rank. `--follow` shows new lines in the order
in which they come, and looks for them every `_LOOK` seconds: another node may write into a shared directory, and no
kernel reports that.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections import deque
from contextlib import suppress
from functools import lru_cache
from itertools import product
from operator import itemgetter
from stat import S_ISREG

from elastic_run import contract
from elastic_run.cli.commands import CommandParser, argument
from elastic_run.control.client import RUN_HELP, find_job
from elastic_run.control.socket_directory import SUFFIX
from elastic_run.core.agent.machine import JOINING
from elastic_run.notices import UsageError, give_up_stdout, say
from elastic_run.records import dataclass
from elastic_run.report.job_history import read_lines
from elastic_run.report.text import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

_LOOK = 0.2
#: Last lines of each file that --follow shows first.
_LAST_LINES = 10
#: Bytes of a line; a longer line is shown in pieces.
_LONGEST = 1 << 20
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_RANKS = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")
_ATTEMPT = re.compile(rf"{contract.ATTEMPT_DIR_PREFIX}(\d+)(?:\.(\d+))?")
_STREAMS = {contract.STDOUT_LOG: "", contract.STDERR_LOG: "stderr"}
#: Runs that an error names.
_NAMED = 6
#: Characters of a run id that are in a directory's name, at least.
_NAME_LENGTH = 40

_RUN = f"a log directory, also of an ended job; or the {RUN_HELP}"
_FOLLOW = "show new lines as they are written, until the job ends"
_SINCE = "only files written to in the last TIME, such as 90s, 10m or 2h"
ARGUMENTS = {
    "logs": [
        argument("run", nargs="?", metavar="RUN", help=_RUN),
        argument("-f", "--follow", action="store_true", help=_FOLLOW),
        argument("--rank", metavar="RANKS", help="only these ranks, such as 3 or 0-3,8"),
        argument("--since", metavar="TIME", help=_SINCE),
        argument("--grep", metavar="TEXT", help="only lines that match this regular expression"),
        argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N lines of each file"),
    ]
}


def run_logs(words: Sequence[str]) -> int:
    """Print the log files of a job; 1 if there is no line to show."""
    args = _read_arguments(words)
    directories, pids = _find_directories(args.run)
    reader = _Reader(args)
    if not args.lines and args.follow:
        args.lines = _LAST_LINES
    files = find_log_files(directories)
    found = {file.rank for file in files}
    if args.rank is not None and found and not args.follow and not any(_is_asked(args, rank) for rank in found):
        message = f"--rank: no such rank has log files: there {'are' if len(found) > 1 else 'is'} {ranks(found)}"
        raise UsageError(message)
    try:
        reader.show(files, args.lines)
        if args.follow:
            _follow(reader, directories, pids)
    except OSError as error:  # of stdout: a log file that can't be read is passed over
        give_up_stdout(error)
    if not (reader.has_shown or reader.has_told):
        say("logs: no line to show")
    return contract.EXIT_SUCCESS if reader.has_shown else contract.EXIT_FAILURE


def _read_arguments(words: Sequence[str]) -> Namespace:
    args = CommandParser("logs").parse_args(words)
    if args.lines < 0:
        message = f"--lines: {args.lines} must be 0 (all) or more"
        raise UsageError(message)
    if args.rank is not None:
        parts = [part.partition("-") for part in args.rank.split(",")] if _RANKS.fullmatch(args.rank) else []
        found = [range(int(first), int(last or first) + 1) for first, _, last in parts]
        if not found or not all(found):
            message = f"--rank: {args.rank!r} is not a list of ranks, such as 3 or 0-3,8"
            raise UsageError(message)
        args.rank = found
    args.since = 0.0 if args.since is None else time.time() - _read_span(args.since)
    try:
        args.grep = re.compile((args.grep or "").encode())
    except re.error as error:
        message = f"--grep: {args.grep!r} is not a regular expression: {error}"
        raise UsageError(message) from None
    return args


def _is_asked(args: Namespace, rank: int) -> bool:
    return args.rank is None or any(rank in part for part in args.rank)


def _read_span(text: str) -> float:
    match = _SPAN.fullmatch(text)
    if match is None:
        message = f"--since: {text!r} is not a time, such as 90s, 10m, 2h or 1d"
        raise UsageError(message)
    return float(match[1]) * _UNITS[match[2]]


# --- from RUN to directories ----------------------------------------------------------------------------------------


def _find_directories(run: str | None) -> tuple[list[str], list[int]]:
    """Return the run directories that RUN means, and the pids of the launchers that write there."""
    if run is not None and os.path.isdir(run):
        return [find_run_directory(run)], []
    if run is not None and os.sep in run and not run.endswith(SUFFIX):
        message = f"there is no directory {run!r}"
        raise UsageError(message)
    job = find_job(os.environ, run, advice="`elastic-run logs DIR` shows the log files of a job that has ended")
    directories = [agent.log_dir for agent in job.agents if agent.log_dir]
    if not directories:
        is_early = any(agent.state == JOINING for agent in job.agents)
        message = (
            f"job {job.label} has no log files yet: it has started no worker"
            if is_early
            else f"job {job.label} keeps no log files; --log-dir=DIR keeps them"
        )
        raise UsageError(message)
    first = job.agents[0]
    if first.max_nodes > 1:
        directories += [path for each in directories for path in _find_siblings(each, first.run_id)]
    return list(dict.fromkeys(directories)), [agent.pid for agent in job.agents]


def find_run_directory(path: str) -> str:
    """Return the run directory that a path names: itself, or the only run in it."""
    try:
        names = os.listdir(path)
    except OSError as error:
        message = f"{path!r} can't be read: {error.strerror}"
        raise UsageError(message) from None
    if _list_attempts(path):
        return path
    runs = (os.path.join(path, name) for name in sorted(names))
    found = {os.path.realpath(run): run for run in runs if _list_attempts(run)}
    if not found:
        message = f"{path!r} holds no log files of a run (directories attempt_0, attempt_1 …)"
        raise UsageError(message)
    if len(found) > 1:
        newest = sorted(found, key=lambda run: os.stat(run).st_mtime, reverse=True)
        shown = ", ".join(found[run] for run in newest[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        message = f"{path!r} has several runs, name one, the newest first: {shown}{more}"
        raise UsageError(message)
    return next(iter(found.values()))


def _find_siblings(directory: str, run_id: str) -> list[str]:
    """Return the run directories of other nodes of the same job beside this one, found by their event logs.

    Earlier jobs may have had the same run id, with which the names of these directories begin.
    """
    jobs = {event.get("job") for event in _read_events(directory, "round_formed")} - {"", None}
    parent = os.path.dirname(directory)
    beginning = f"{run_id.replace('/', '_')[:_NAME_LENGTH]}"
    paths = (os.path.join(parent, name) for name in sorted(_list_names(parent)) if name.startswith(beginning))
    return [
        path
        for path in paths
        if path != directory and any(event.get("job") in jobs for event in _read_events(path, "round_formed"))
    ]


# --- from directories to files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogFile:
    """One stream of one worker in one attempt: `stream` is "" for stdout."""

    path: str
    attempt: str
    rank: int
    stream: str


def find_log_files(directories: Iterable[str]) -> list[LogFile]:
    """Return all log files of some run directories: by attempt, then by node and rank."""
    found: list[tuple[tuple[object, ...], LogFile]] = []
    for node, directory in enumerate(directories):
        attempts = _list_attempts(directory)
        by_round = _read_ranks(directory)
        for index, (number, attempt) in enumerate(attempts):
            by_local = by_round[index] if len(by_round) == len(attempts) else {}
            names = [name for name in _list_names(os.path.join(directory, attempt)) if name.isdecimal()]
            for name, (file, stream) in product(names, _STREAMS.items()):
                path, rank = os.path.join(directory, attempt, name, file), by_local.get(int(name), int(name))
                # A link leads to the file beside it, which has both streams.
                if os.path.isfile(path) and not os.path.islink(path):
                    found.append(((number, node, rank, stream), LogFile(path, attempt, rank, stream)))
    found.sort(key=itemgetter(0))
    return [file for _, file in found]


def _list_attempts(directory: str) -> list[tuple[tuple[int, int], str]]:
    """Return the attempts of a run with their numbers, the first one first."""
    matches = ((_ATTEMPT.fullmatch(name), name) for name in _list_names(directory))
    return sorted(((int(match[1]), int(match[2] or 0)), name) for match, name in matches if match)


def _list_names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _read_ranks(directory: str) -> list[dict[int, int]]:
    """Return for each round of this node the ranks of its workers by local rank, as far as the event log tells.

    If it does not know as many rounds as there are attempts, the local rank counts.
    """
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
        return _read_events_of(path, name, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else ()
    except OSError:
        return ()


@lru_cache(maxsize=256)
def _read_events_of(path: str, name: str, size: int, changed: int) -> tuple[dict[str, Any], ...]:
    """Read them; again only where size or time of the file are others, for `logs -f` looks some times a second."""
    del size, changed
    marker, found = f'"{name}"'.encode(), []
    with open(path, "rb") as file:
        for line in filter(lambda line: marker in line, read_lines(file)):
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return tuple(event for event in found if isinstance(event, dict) and event.get("event") == name)


# --- from files to lines ---------------------------------------------------------------------------------------------


class _Reader:
    """Shows lines of log files, each file from where it was left."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._attempt = ""
        self.has_shown = False
        #: Whether the user was told of a file that can't be read: of the first one only.
        self.has_told = False

    def show(self, files: Iterable[LogFile], last: int = 0, *, is_end: bool = False) -> None:
        """Show new lines: the `last` ones of each file, or all with 0.

        At the end the files are complete, so that a last line without an end is shown, too.
        """
        if is_end:
            self._sizes.clear()
        for file in files:
            if not _is_asked(self._args, file.rank):
                continue
            is_whole = is_end or not self._args.follow
            lines = (line for line in self._read(file, is_whole=is_whole) if self._args.grep.search(line))
            for line in deque(lines, last) if last else lines:
                self._write(file, line)
        sys.stdout.buffer.flush()

    def _read(self, file: LogFile, *, is_whole: bool) -> Iterator[bytes]:
        """Read the new lines of a file; a line without an end waits for its end, unless the file is complete."""
        try:
            status = os.stat(file.path)
            if status.st_mtime < self._args.since or status.st_size == self._sizes.get(file.path, 0):
                return
            self._sizes[file.path] = status.st_size
            with open(file.path, "rb") as lines:
                start = self._offsets.get(file.path, 0)
                start = start if start <= status.st_size else 0  # a file that was truncated begins again
                lines.seek(start)
                while line := lines.readline(_LONGEST):
                    if not (line.endswith(b"\n") or is_whole or len(line) == _LONGEST):
                        break
                    start += len(line)
                    self._offsets[file.path] = start
                    yield line
        except OSError as error:
            if not self.has_told:
                self.has_told = True
                say(f"logs: {file.path} can't be read: {error.strerror}")

    def _write(self, file: LogFile, line: bytes) -> None:
        out = sys.stdout.buffer
        self.has_shown = True
        if file.attempt != self._attempt:
            self._attempt = file.attempt
            out.write(f"--- {file.attempt}\n".encode())
        stream = f" {file.stream}" if file.stream else ""
        out.write(f"[{file.rank}{stream}] ".encode() + line.rstrip(b"\n") + b"\n")


def _follow(reader: _Reader, directories: list[str], pids: Sequence[int]) -> None:
    """Show new lines until all launchers have ended; without end if no launcher is known."""
    poll, left = select.poll(), 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            poll.register(os.pidfd_open(pid), select.POLLIN)
            left += 1
    while left or not pids:
        for fd, _ in poll.poll(_LOOK * 1000):
            poll.unregister(fd)
            os.close(fd)
            left -= 1
        reader.show(find_log_files(directories))
    reader.show(find_log_files(directories), is_end=True)
