"""The output of the workers of a round: one `Channel` for each stream that `Wiring` has opened.

The way of a byte: a channel reads it from its pipe, writes it to the log file, gives it to the tail for the report, and
writes it to the console's stream when it is the channel's turn (`worker_lines`, then `console`, then `sink`).
"""

from __future__ import annotations

import os
import select
import sys

from elastic_run.multiprocessing.logs import is_log
from elastic_run.multiprocessing.output.sink import FilteredCopy, LogFile
from elastic_run.multiprocessing.output.tail import Activity, Tail, read_tail
from elastic_run.multiprocessing.output.worker_lines import READ_SIZE, Captured, FoldedOutput, Teed
from elastic_run.multiprocessing.wiring import (
    MUTED,
    STDERR,
    STDOUT,
    TEED,
    copy_window_size,
    describe_descriptor,
    is_out_of_descriptors,
    open_log,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.logs import LogsDest
    from elastic_run.multiprocessing.output.console import Console
    from elastic_run.multiprocessing.output.worker_lines import Channel
    from elastic_run.multiprocessing.wiring import Line, Wiring

#: A tee'd line that is longer is written in parts. All unfinished lines together stay below `_LINES_TOTAL`.
_LINE_LIMIT = 1 << 20
_LINE_LIMIT_LEAST = 1 << 16
_LINES_TOTAL = 1 << 24


class WorkerOutput:
    """The output of one round's workers; for `on_output` see `Activity`."""

    def __init__(
        self,
        loop: Loop,
        console: Console,
        wiring: Wiring,
        *,
        on_output: Callable[[int, float | None], None] = lambda *_: None,
    ) -> None:
        #: When each worker has last written, by local rank.
        self.activities: dict[int, Activity] = {}
        #: Local ranks of workers whose stdout passes through the launcher too.
        self.with_stdout: set[int] = set()
        self._on_output = on_output
        self._loop = loop
        self._console = console
        self._wiring = wiring
        self._channels: dict[int, list[Channel]] = {}
        self._tails: dict[int, Tail] = {}
        self._copies: dict[int, FilteredCopy] = {}
        self._folded: FoldedOutput | None = None
        self._losses_told: set[int | None] = set()
        _keep_freed_memory()

    def open_filtered(
        self, logs: LogsDest, stdout_filters: Sequence[str] | None, stderr_filters: Sequence[str] | None
    ) -> None:
        """Copy tee'd lines that contain any of some texts into the files of `logs`; to be called before `attach`.

        Raises:
            OSError: There are no descriptors left.
        """
        # The class of torch 2.8 has no such fields.
        paths = getattr(logs, "filtered_stdout", ""), getattr(logs, "filtered_stderr", "")
        for fd, path, filters in zip((STDOUT, STDERR), paths, (stdout_filters, stderr_filters), strict=True):
            if not filters or not is_log(path):
                continue
            try:
                self._copies[fd] = FilteredCopy(self._log_file(open_log(path), path), filters)
            except OSError as error:
                if is_out_of_descriptors(error):
                    raise
                self._report_loss(path, error)

    def attach(self, prefix: Callable[[int], str], *, ranks: Mapping[int, int] | None = None) -> None:
        """Listen to every worker that is wired, from now on; `prefix` gives a local rank's text before tee'd lines.

        `ranks` has the rank of each local rank if lines of stderr that several ranks write are shown once.
        """
        for path, error in self._wiring.losses:
            self._report_loss(path, error)
        tees = sum(line.purpose == TEED for lines in self._wiring.lines.values() for line in lines)
        limit = max(_LINE_LIMIT_LEAST, min(_LINE_LIMIT, _LINES_TOTAL // max(1, tees)))
        for local_rank, lines in self._wiring.lines.items():
            self.activities[local_rank] = Activity(local_rank, self._loop.now(), self._on_output)
            if any(line.has_stdout for line in lines):
                self.with_stdout.add(local_rank)
            text = prefix(local_rank).encode("utf-8", "surrogateescape")
            self._channels[local_rank] = [self._listen(local_rank, line, text, limit) for line in lines]
        self._wiring.lines = {}
        shown = {
            ranks[local_rank]: channel
            for local_rank, channels in self._channels.items()
            for channel in channels
            if ranks is not None and channel.line.fd == STDERR and channel.line.purpose != MUTED
        }
        if len(shown) > 1 and STDERR not in self._copies:  # a filter needs the lines of each rank
            self._folded = FoldedOutput(self._loop, self._console.stream(STDERR), shown)

    def _listen(self, local_rank: int, line: Line, prefix: bytes, limit: int) -> Channel:
        stream = self._console.nowhere if line.purpose == MUTED else self._console.stream(line.fd)
        file = self._log_file(line.file, line.path) if line.file >= 0 else None
        tail = self._tails.setdefault(local_rank, Tail()) if line.fd == STDERR else None
        common = (self._loop, stream, line, self.activities[local_rank], file, tail)
        if line.purpose == TEED:
            return Teed(*common, prefix=prefix, limit=limit, copy=self._copies.get(line.fd))
        return Captured(*common)

    def _log_file(self, file: int, path: str) -> LogFile:
        return LogFile(file, lambda error: self._report_loss(path, error))

    def _report_loss(self, path: str, error: OSError) -> None:
        """Say it once per cause: when a disk is full, it is full for every rank."""
        if error.errno not in self._losses_told:
            self._losses_told.add(error.errno)
            rest = "the console gets all output, and the job goes on"
            self._console.say(f"the log file {path} is incomplete, as others may be ({error.strerror}): {rest}")

    @property
    def _open(self) -> list[Channel]:
        return [channel for channels in self._channels.values() for channel in channels if not channel.is_ended]

    def resize(self) -> None:
        """Give the workers' terminals the size of the launcher's."""
        for channel in self._open:
            if channel.line.is_terminal:
                copy_window_size(channel.line.fd, channel.line.reading)

    def catch_up(self, local_rank: int) -> None:
        """Read the output of an ended worker up to now; its descendants may write more."""
        for channel in self._channels.get(local_rank, ()):
            channel.catch_up()

    def leave(self) -> list[int]:
        """Let another process pass on the output of background processes from now on; call it before `close`.

        Returns its session; nothing if none is needed.

        Raises:
            OSError: It can't be started.
        """
        if self._folded is not None:
            self._folded.flush()
        targets = {channel.line.reading: channel.targets for channel in self._open if channel.targets}
        return [pass_on_elsewhere(targets)] if targets else []

    def finish(self, local_rank: int) -> None:
        """Read the rest of an ended worker's pipes, end its last lines, close its files.

        The worker and its descendants are gone. Bytes that the console can't take at once are written later, but before
        later lines of the launcher; see `Console.is_idle`.
        """
        for channel in self._channels.pop(local_rank, ()):
            channel.finish()

    def tail(self, local_rank: int, *, is_thorough: bool = True) -> bytes:
        """Return the end of a worker's stderr, as `Tail` keeps it; it is complete after `finish`."""
        if local_rank in self._tails:
            return self._tails[local_rank].read()
        path = self._wiring.redirects.get(local_rank)
        return b"" if path is None else read_tail(path, is_thorough=is_thorough)

    def uncaptured_target(self, local_rank: int) -> str:
        """Return the target of a worker's stderr if neither a pipe nor a log file has kept its end, or ""."""
        if local_rank in self._tails:
            return ""
        path = self._wiring.redirects.get(local_rank, "")
        return describe_descriptor(STDERR) if not path else path if path == os.devnull else ""

    def close(self) -> None:
        """Finish every worker, and close the files that they share."""
        for local_rank in (*self._channels,):
            self.finish(local_rank)
        if self._folded is not None:
            self._folded.close()
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()


def _keep_freed_memory() -> None:
    """Let the C library keep a few freed MiB for the next batch.

    Otherwise glibc gives every batch back to the kernel and faults in fresh pages for the next one, which takes half of
    the time. It raises its threshold to the largest mapped block that was ever freed (mallopt(3), M_MMAP_THRESHOLD).
    """
    block = bytes(1 << 22)  # never touched, so it costs two system calls
    del block


# --- what background processes write after the job --------------------------------------------------------------------
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elastic_run.multiprocessing.output import worker_output; worker_output.main()"
)


def pass_on_elsewhere(targets: Mapping[int, Sequence[int]]) -> int:
    """Start a process that copies what comes to each reading end to its targets; return the process's session.

    A background process that writes into a pipe without a reader gets SIGPIPE. The copying process lives until the last
    of them has ended, and holds the launcher's stdout or stderr open, as they do themselves under torch. It is never
    the launcher's child, and exec'd, since the launcher may be a program with threads.

    Raises:
        OSError: It can't be started, or this program has no interpreter.
    """
    from elastic_run.multiprocessing.fork_exec import find_interpreter, inheritable_descriptors, start_process

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    words = [f"{reading}:{','.join(map(str, fds))}" for reading, fds in targets.items()]
    kept = {fd for reading, fds in targets.items() for fd in (reading, *fds)} - {STDOUT, STDERR}
    closed = [fd for fd in inheritable_descriptors() if fd not in kept]
    argv = [find_interpreter(), "-I", "-S", "-c", _CODE, root, *words]
    pid = start_process(argv, os.environ, closed=closed, kept=sorted(kept))
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # another part of this program was quicker
    return pid


def main() -> None:
    """In the new process: fork once more, so that the launcher is not its parent, and copy until all have ended.

    Each argument is a reading end and its targets, as `READING:TARGET,TARGET`.
    """
    from elastic_run.multiprocessing.guardian import become_daemon

    if os.fork():
        return
    pairs = [word.partition(":") for word in sys.argv[2:]]
    left = {int(reading): [int(fd) for fd in fds.split(",")] for reading, _, fds in pairs}
    become_daemon("output of background processes", "output", {fd for each in left for fd in (each, *left[each])})
    poll = select.poll()
    for reading in left:
        poll.register(reading, select.POLLIN)
    while left:
        for reading, _ in poll.poll():
            try:
                data = os.read(reading, READ_SIZE)
            except BlockingIOError:
                continue
            except OSError:
                data = b""  # a terminal whose last user has gone
            if not data:
                poll.unregister(reading)
                del left[reading]
                continue
            left[reading] = [fd for fd in left[reading] if _write_all(fd, data)]


def _write_all(fd: int, data: bytes) -> bool:
    """Write, and wait where a descriptor takes nothing now; return whether the descriptor may take more later."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
        except OSError:
            return False  # nobody reads there, or the disk is full
    return True
