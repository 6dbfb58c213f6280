"""``elastic-run logs [RUN]``: the log files of a job that runs or has ended, across its attempts.

Log files have no times, so they are shown attempt by attempt and rank by rank. `--follow` shows new lines in the order
in which they come. It looks for them every `_LOOK` seconds: another node may write into a shared directory, and no
kernel reports that. The end of the job is awaited on its launcher's descriptor.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.log_files import find_log_files, find_run_directories, find_siblings
from elastic_run.cli.stdout import give_up_stdout
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.control.socket_directory import SUFFIX
from elastic_run.core.agent.machine import JOINING
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.wording import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence

    from elastic_run.cli.log_files import LogFile

_LOOK = 0.2
#: Last lines of each file that --follow shows first.
_LAST_LINES = 10
#: Bytes of a line; a longer line is shown in pieces.
_LONGEST = 1 << 20
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_RANKS = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("logs")
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help=f"a log directory, also of an ended job; or the {RUN_HELP}"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="show new lines as they are written, until the job ends"
    )
    parser.add_argument("--rank", metavar="RANKS", help="only these ranks, such as 3 or 0-3,8")
    parser.add_argument(
        "--since", metavar="TIME", help="only files written to in the last TIME, such as 90s, 10m or 2h"
    )
    parser.add_argument("--grep", metavar="TEXT", help="only lines that match this regular expression")
    parser.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N lines of each file")
    return parser


def main(words: Sequence[str]) -> int:
    """Print the log files of a job.

    Returns:
        0, or 1 if there is no line to show.

    Raises:
        UsageError: There is no such job, no such directory, no such rank, it has no log files, or stdout can't be
            written.
        SystemExit: The help was printed (0).
    """
    args = _read_arguments(words)
    directories, pids = _find_directories(args.run)
    reader = _Reader(args)
    if not args.lines and args.follow:
        args.lines = _LAST_LINES
    files = find_log_files(directories)
    if args.rank is not None and not args.follow:
        _check_ranks(args.rank, {file.rank for file in files})
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
    args = make_parser().parse_args(words)
    if args.lines < 0:
        message = f"--lines: {args.lines} must be 0 (all) or more"
        raise UsageError(message)
    args.rank = None if args.rank is None else _read_ranks(args.rank)
    args.since = 0.0 if args.since is None else time.time() - _read_span(args.since)
    try:
        args.grep = re.compile((args.grep or "").encode())
    except re.error as error:
        message = f"--grep: {args.grep!r} is not a regular expression: {error}"
        raise UsageError(message) from None
    return args


def _read_ranks(text: str) -> list[range]:
    parts = [part.partition("-") for part in text.split(",")] if _RANKS.fullmatch(text) else []
    found = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if not found or not all(found):
        message = f"--rank: {text!r} is not a list of ranks, such as 3 or 0-3,8"
        raise UsageError(message)
    return found


def _check_ranks(asked: list[range], found: set[int]) -> None:
    if found and not any(rank in part for part in asked for rank in found):
        message = f"--rank: no such rank has log files: there {'are' if len(found) > 1 else 'is'} {ranks(found)}"
        raise UsageError(message)


def _read_span(text: str) -> float:
    match = _SPAN.fullmatch(text)
    if match is None:
        message = f"--since: {text!r} is not a time, such as 90s, 10m, 2h or 1d"
        raise UsageError(message)
    return float(match[1]) * _UNITS[match[2]]


def _find_directories(run: str | None) -> tuple[list[str], list[int]]:
    """Return the run directories that RUN means, and the pids of the launchers that write there."""
    if run is not None and os.path.isdir(run):
        try:
            os.listdir(run)
        except OSError as error:
            message = f"{run!r} can't be read: {error.strerror}"
            raise UsageError(message) from None
        return find_run_directories(run), []
    if run is not None and os.sep in run and not run.endswith(SUFFIX):
        message = f"there is no directory {run!r}"
        raise UsageError(message)
    job = find_job(os.environ, run, advice="`elastic-run logs DIR` shows the log files of a job that has ended")
    directories = [agent.log_dir for agent in job.agents if agent.log_dir]
    if not directories:
        is_early = any(agent.state == JOINING for agent in job.agents)
        none = (
            "has no log files yet: it has started no worker"
            if is_early
            else "keeps no log files; --log-dir=DIR keeps them"
        )
        message = f"job {job.label} {none}"
        raise UsageError(message)
    first = job.agents[0]
    siblings = (
        [path for each in directories for path in find_siblings(each, first.run_id)] if first.max_nodes > 1 else []
    )
    return list(dict.fromkeys(directories + siblings)), [agent.pid for agent in job.agents]


class _Reader:
    """Shows lines of log files, each file from where it was left.

    Attributes:
        has_shown: Whether there was a line to show.
        has_told: Whether the user was told of a file that can't be read: of the first one only.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._attempt = ""
        self.has_shown = False
        self.has_told = False

    def show_rest(self, files: Iterable[LogFile]) -> None:
        """Show the rest of the files, with a last line that has no end."""
        self._sizes.clear()
        self.show(files, is_end=True)

    def show(self, files: Iterable[LogFile], last: int = 0, *, is_end: bool = False) -> None:
        """Show new lines.

        Args:
            files: The files.
            last: Number of last lines of each file to show; 0 for all.
            is_end: Whether the files are complete.
        """
        for file in files:
            if self._args.rank is not None and not any(file.rank in part for part in self._args.rank):
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
    descriptors = [fd for pid in pids if (fd := _open_pidfd(pid)) is not None]
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    left = len(descriptors)
    while left or not pids:
        for fd, _ in poll.poll(_LOOK * 1000):
            poll.unregister(fd)
            os.close(fd)
            left -= 1
        reader.show(find_log_files(directories))
    reader.show_rest(find_log_files(directories))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it has ended
