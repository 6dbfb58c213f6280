"""The streams of one round's workers: which descriptors each gets, and what becomes of what it writes.

For each of stdout and stderr of a worker, one of
- inherited: the launcher's own descriptor (stdout on the console; with --no-capture stderr too);
- redirected: a file that the worker writes itself;
- tee'd: a pipe; the launcher writes the file, and whole lines with a prefix to the console;
- captured (stderr on the console): a pipe or, on a terminal, a raw pseudo-terminal; the launcher passes every byte on
  unchanged and keeps the end for the report. Where the launcher's stdout and stderr are the same file, a worker's
  stdout goes through that same channel, so that the order of the two stays;
- muted (stderr of a rank that --local-ranks-filter leaves out): a pipe of which only the end is kept, for the report.

Redirects and tee add to files that are there, they never truncate.
"""

from __future__ import annotations

import errno
import os

from elastic_run.multiprocessing.output.channel import Channel
from elastic_run.multiprocessing.output.console import STDERR, STDOUT
from elastic_run.multiprocessing.output.ends import copy_window_size, open_pipe, open_terminal
from elastic_run.multiprocessing.output.filters import FilteredCopy
from elastic_run.multiprocessing.output.logfile import LogFile, open_log
from elastic_run.multiprocessing.output.outlet import Lines, Outlet, PassThrough
from elastic_run.multiprocessing.output.tail import Tail, read_tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

#: A tee'd line that is longer is written in parts. All unfinished lines together stay below `_LINES_TOTAL`.
_LINE_LIMIT = 1 << 20
_LINE_LIMIT_LEAST = 1 << 16
_LINES_TOTAL = 1 << 24
#: Pipes that may have 1 MiB: what they hold when the workers die has to fit into memory.
_LARGE_PIPES = 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class WorkerOutput:
    """The output of one round's workers.

    Args:
        loop: The agent's loop.
        console: The launcher's stdout and stderr.
        capture: Whether stderr passes through the launcher.
    """

    def __init__(self, loop: Loop, console: Console, *, capture: bool = True) -> None:
        self._loop = loop
        self._console = console
        self._capture = capture
        self._has_terminal = os.isatty(STDERR)
        self._channels: dict[int, list[Channel]] = {}
        self._terminals: list[Channel] = []
        self._ends: dict[int, list[int]] = {}
        self._tails: dict[int, Tail] = {}
        self._redirects: dict[int, str] = {}
        self._copies: dict[int, FilteredCopy] = {}
        self._tees = 0
        self._pipes = 0
        self._losses_told: set[int | None] = set()
        _keep_freed_memory()

    # --- before a worker starts ------------------------------------------------------------------------------------
    def open_filtered(
        self, stdout: str, stderr: str, *, stdout_filters: Iterable[str], stderr_filters: Iterable[str]
    ) -> None:
        """Copy tee'd lines that contain a text into files; to be called before `open`.

        Args:
            stdout: File for lines of stdout, or an empty string.
            stderr: File for lines of stderr, or an empty string.
            stdout_filters: Any of these texts, for stdout.
            stderr_filters: Any of these texts, for stderr.
        """
        for fd, path, filters in ((STDOUT, stdout, stdout_filters), (STDERR, stderr, stderr_filters)):
            if _is_file(path):
                file = self._open_file(path)
                if file is not None:
                    self._copies[fd] = FilteredCopy(file, filters)

    def open(
        self,
        local_rank: int,
        *,
        stdout: str,
        stderr: str,
        tee_stdout: bool = False,
        tee_stderr: bool = False,
        stdout_prefix: bytes = b"",
        stderr_prefix: bytes = b"",
    ) -> tuple[int, int]:
        """Make the descriptors for a worker.

        Args:
            local_rank: Its number on this node.
            stdout: A log file's path, or an empty string for the console.
            stderr: Ditto.
            tee_stdout: Whether stdout goes to the console too.
            tee_stderr: Whether stderr does.
            stdout_prefix: Stands in front of every tee'd line of stdout.
            stderr_prefix: Ditto of stderr.

        Returns:
            What the worker gets as descriptors 1 and 2; they stay open until `started`.

        Raises:
            OSError: There are no descriptors left.
        """
        self._channels[local_rank] = []
        self._ends[local_rank] = []
        try:
            if self._is_merged(stdout, stderr, tee=tee_stdout or tee_stderr):
                both = self._open_captured(local_rank)
                return (both, both) if both != STDERR else (STDOUT, STDERR)
            out = self._open_one(local_rank, STDOUT, stdout, tee=tee_stdout, prefix=stdout_prefix)
            err = self._open_one(local_rank, STDERR, stderr, tee=tee_stderr, prefix=stderr_prefix)
        except OSError:
            self.started(local_rank)
            self.finish(local_rank)
            raise
        return out, err

    def _is_merged(self, stdout: str, stderr: str, *, tee: bool) -> bool:
        return self._capture and self._console.is_shared and not (stdout or stderr or tee)

    def _open_one(self, local_rank: int, fd: int, path: str, *, tee: bool, prefix: bytes) -> int:
        if tee:
            return self._open_tee(local_rank, fd, path, prefix)
        if path and (path != os.devnull or fd == STDOUT or not self._capture):
            return self._open_redirect(local_rank, fd, path)
        if fd == STDERR and self._capture:
            return self._open_muted(local_rank) if path else self._open_captured(local_rank)
        return fd

    def _open_tee(self, local_rank: int, fd: int, path: str, prefix: bytes) -> int:
        self._tees += 1
        ends = self._open_pipe()
        lines = Lines(self._loop, self._console.stream(fd), prefix, limit=self._line_limit, copy=self._copies.get(fd))
        file = self._open_file(path) if _is_file(path) else None
        self._add(local_rank, ends, outlet=lines, file=file, is_kept=fd == STDERR)
        return ends[1]

    def _line_limit(self) -> int:
        return max(_LINE_LIMIT_LEAST, min(_LINE_LIMIT, _LINES_TOTAL // self._tees))

    def _open_redirect(self, local_rank: int, fd: int, path: str) -> int:
        try:
            end = open_log(path)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            self._tell_loss(path, error)
            return self._open_one(local_rank, fd, "", tee=False, prefix=b"")
        if fd == STDERR:
            self._redirects[local_rank] = path
        self._ends[local_rank].append(end)
        return end

    def _open_captured(self, local_rank: int) -> int:
        try:
            ends = open_terminal(STDERR) if self._has_terminal else self._open_pipe()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS or not self._has_terminal:
                raise
            return STDERR  # no pseudo-terminal to be had: better no tail than a worker without colours
        channel = self._add(local_rank, ends, outlet=PassThrough(self._console.stream(STDERR)), is_kept=True)
        if self._has_terminal:
            self._terminals.append(channel)
        return ends[1]

    def _open_muted(self, local_rank: int) -> int:
        ends = self._open_pipe()
        self._add(local_rank, ends, is_kept=True)
        return ends[1]

    def _open_pipe(self) -> tuple[int, int]:
        self._pipes += 1
        return open_pipe(is_large=self._pipes <= _LARGE_PIPES)

    def _add(
        self,
        local_rank: int,
        ends: tuple[int, int],
        *,
        outlet: Outlet | None = None,
        file: LogFile | None = None,
        is_kept: bool,
    ) -> Channel:
        reading, writing = ends
        tail = self._tails.setdefault(local_rank, Tail()) if is_kept else None
        channel = Channel(self._loop, reading, outlet=outlet, file=file, tail=tail)
        self._channels[local_rank].append(channel)
        self._ends[local_rank].append(writing)
        return channel

    def _open_file(self, path: str) -> LogFile | None:
        try:
            return LogFile(open_log(path), lambda error: self._tell_loss(path, error))
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            self._tell_loss(path, error)
            return None

    def _tell_loss(self, path: str, error: OSError) -> None:
        """Say it once per cause: when a disk is full, it is full for every rank."""
        if error.errno not in self._losses_told:
            self._losses_told.add(error.errno)
            self._console.say(f"{path}: {error.strerror}: log files will be incomplete; the job goes on")

    # --- while it runs ---------------------------------------------------------------------------------------------
    def started(self, local_rank: int) -> None:
        """Close this process's copies of what the worker got; call it also when the start has failed."""
        for end in self._ends.pop(local_rank, ()):
            os.close(end)

    def resize(self) -> None:
        """Give the workers' terminals the size of the launcher's."""
        for channel in self._terminals:
            if channel.is_open:
                copy_window_size(STDERR, channel.fd)

    # --- after its end ---------------------------------------------------------------------------------------------
    def finish(self, local_rank: int) -> None:
        """Take what an ended worker has left in its pipes, end its last lines, close its files.

        The worker and its descendants are gone. What the console can't take at once is written by and by, before
        anything that the launcher writes later; `Console.flush` waits for it.
        """
        for channel in self._channels.pop(local_rank, ()):
            channel.finish()

    def tail(self, local_rank: int) -> bytes:
        """Return the end of a worker's stderr, at most `contract.CAPTURE_BYTES`; all there is after `finish`."""
        if local_rank in self._tails:
            return self._tails[local_rank].read()
        return read_tail(self._redirects[local_rank]) if local_rank in self._redirects else b""

    def close(self) -> None:
        """Finish every worker, and close what they share."""
        for local_rank in (*self._channels,):
            self.started(local_rank)
            self.finish(local_rank)
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()


def _is_file(path: str) -> bool:
    return path not in ("", os.devnull)


def _keep_freed_memory() -> None:
    """Let the C library keep a few freed MiB for the next batch.

    Otherwise glibc gives every batch back to the kernel and faults in fresh pages for the next one, which takes half of
    the time. It raises its threshold to the largest mapped block that was ever freed (mallopt(3), M_MMAP_THRESHOLD).
    """
    block = bytes(1 << 22)  # never touched, so it costs two system calls
    del block
