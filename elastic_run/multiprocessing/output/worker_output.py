"""Reads the output of the workers of a round: shows it, writes it to files, keeps its end for the report.

`Wiring` has connected and opened each stream; the objects here read and close the launcher's ends. The way of a byte:
`Channel` reads it from its pipe, writes it to the log file, gives it to the tail for the report, and then to a source
of the console (`console_lines`), which shows it when it is the source's turn (`console`).
"""

from __future__ import annotations

import os
import select
import sys

from elastic_run.multiprocessing.logs import is_log
from elastic_run.multiprocessing.output.console_lines import FilteredCopy, InterruptFold, Lines, PassThrough
from elastic_run.multiprocessing.output.sink import Backlog, LogFile
from elastic_run.multiprocessing.output.tail import Tail, read_tail
from elastic_run.multiprocessing.wiring import (
    CAPTURED,
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
    from elastic_run.multiprocessing.wiring import Line, Wiring

#: A tee'd line that is longer is written in parts. All unfinished lines together stay below `_LINES_TOTAL`.
_LINE_LIMIT = 1 << 20
_LINE_LIMIT_LEAST = 1 << 16
_LINES_TOTAL = 1 << 24
#: Bytes per read. More doesn't make it faster; it makes batches that stall the loop for longer.
_READ_SIZE = 1 << 18
#: More than a pseudo-terminal or a pipe holds, also if the worker has enlarged it.
_CAPACITY = 1 << 24
#: Seconds without output that count as a silence.
SILENCE = 10.0
#: Bytes of the last output that are kept, to show its last line.
_KEPT = 512


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
        self._fold: InterruptFold | None = None
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

    def attach(self, prefix: Callable[[int], str]) -> None:
        """Listen to every worker that is wired, from now on; `prefix` gives a local rank's text before tee'd lines."""
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

    def _listen(self, local_rank: int, line: Line, prefix: bytes, limit: int) -> Channel:
        source: PassThrough | Lines | None = None
        stream, copy = self._console.stream(line.fd), self._copies.get(line.fd)
        file = self._log_file(line.file, line.path) if line.file >= 0 else None
        if line.purpose == CAPTURED:
            source = PassThrough(stream, is_watched=line.is_terminal)
        elif line.purpose == TEED:
            # A filtered copy is made of what is shown, and closed with the round: it can't be far behind.
            backlog = None if file is None or copy is not None else Backlog(file)
            source = Lines(self._loop, stream, prefix, limit=limit, copy=copy, backlog=backlog)
        tail = self._tails.setdefault(local_rank, Tail()) if line.fd == STDERR else None
        return Channel(self._loop, line, self.activities[local_rank], source=source, file=file, tail=tail)

    def _log_file(self, file: int, path: str) -> LogFile:
        return LogFile(file, lambda error: self._report_loss(path, error))

    def _report_loss(self, path: str, error: OSError) -> None:
        """Say it once per cause: when a disk is full, it is full for every rank."""
        if error.errno not in self._losses_told:
            self._losses_told.add(error.errno)
            rest = "the console gets all output, and the job goes on"
            self._console.say(f"the log file {path} is incomplete, as others may be ({error.strerror}): {rest}")

    def resize(self) -> None:
        """Give the workers' terminals the size of the launcher's."""
        for channels in self._channels.values():
            for channel in channels:
                if channel.line.is_terminal and channel.is_open:
                    copy_window_size(channel.line.fd, channel.fd)

    def fold_interrupts(self) -> None:
        """Show equal KeyboardInterrupts of the workers once from now on; to be called when they get SIGINT."""
        if self._fold is not None or STDERR in self._copies:  # a filter looks for its lines in all that is shown
            return
        shown = [
            (channel, channel.source, rank)
            for rank, channels in self._channels.items()
            for channel in channels
            if channel.source is not None and channel.line.fd == STDERR
        ]
        if len(shown) > 1:
            self._fold = InterruptFold(self._loop, {source: rank for _, source, rank in shown})
            for channel, _, _ in shown:
                channel.fold = self._fold

    def list_folded(self) -> list[tuple[str, list[int]]]:
        """Return the place of each KeyboardInterrupt that was shown once for several workers, and their local ranks."""
        return [] if self._fold is None else self._fold.list_folded()

    def catch_up(self, local_rank: int) -> None:
        """Read the output of an ended worker up to now; its descendants may write more."""
        for channel in self._channels.get(local_rank, ()):
            channel.catch_up()

    def leave(self, *, is_exec: bool) -> list[int]:
        """Let another process pass on the output of background processes from now on; call it before `close`.

        Returns its session; nothing if none is needed.
        """
        opened = [channel for channels in self._channels.values() for channel in channels if channel.is_open]
        targets = {channel.fd: channel.targets for channel in opened if channel.targets}
        return [pass_on_elsewhere(targets, is_exec=is_exec)] if targets else []

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
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()


class Channel:
    """The launcher's side of a stream that a worker writes: passes every byte to file, tail and console.

    It owns the reading end and the log file. It reads only while its source is ready, so a worker whose output is not
    taken waits at the full pipe. The stream ends with an end of file (EIO on a pseudo-terminal whose last user has
    gone), or with `finish`. At `finish` the worker and all its descendants are dead, so the pipe holds the last bytes,
    even if a stray process has it open. Such a process gets EPIPE from then on.
    """

    def __init__(
        self,
        loop: Loop,
        line: Line,
        activity: Activity,
        *,
        source: PassThrough | Lines | None,
        file: LogFile | None,
        tail: Tail | None,
    ) -> None:
        self.line = line
        self.fd = line.reading
        self.source = source
        #: Stands before the source, if anything does.
        self.fold: InterruptFold | None = None
        self._loop = loop
        self._activity = activity
        self._file = file
        self._tail = tail
        loop.add_reader(self.fd, self._on_readable)

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return self.fd >= 0

    @property
    def targets(self) -> list[int]:
        """Where its bytes go: descriptors of the console and of the log file."""
        return [self.line.fd] * (self.source is not None) + [self.line.file] * (self._file is not None)

    def catch_up(self) -> None:
        """Take what is in the pipe, not what somebody goes on writing; harmless when it is closed."""
        left = _CAPACITY
        while self.is_open and left > 0 and (size := self._read()):
            left -= size

    def finish(self) -> None:
        """Take what is in the pipe, and close it; harmless when it is closed."""
        self.catch_up()
        self._end()

    def _on_readable(self) -> None:
        if self.source is None or self.source.is_ready:
            self._read()
        else:
            self._loop.remove_reader(self.fd)
            self.source.when_clear(self._resume)

    def _resume(self) -> None:
        """Read once, so that waiting channels take turns, and go on as soon as these bytes are written."""
        if self.is_open:
            self._read()
        if not self.is_open or self.source is None:
            return
        if self.source.is_ready:
            self._loop.add_reader(self.fd, self._on_readable)
        else:
            self.source.when_clear(self._resume)

    def _read(self) -> int:
        """Read once; return how much there was."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the pseudo-terminal has no user any more
        if not data:
            self._end()
            return 0
        self._activity.add(data, self._loop.now())
        if self._file is not None:
            self._file.write(data)
        if self._tail is not None:
            self._tail.add(data)
        if self.source is not None:
            if self.fold is None:
                self.source.add(data)
            else:
                self.fold.add(self.source, data)
        return len(data)

    def _end(self) -> None:
        if not self.is_open:
            return
        self._loop.remove_reader(self.fd)
        os.close(self.fd)
        self.fd = -1
        if self._file is not None:
            self._file.close()
        if self.source is not None:
            if self.fold is not None:
                self.fold.release(self.source)
            self.source.end()


class Activity:
    """When a worker has last written (`last`, monotonic seconds), as far as its output passes through the launcher.

    `on_output` is called with the worker's first output, and with output that ends a silence: the local rank, and the
    silence in seconds, or None for the first output.
    """

    __slots__ = ("_has_written", "_local_rank", "_on_output", "_recent", "last")

    def __init__(self, local_rank: int, began_at: float, on_output: Callable[[int, float | None], None]) -> None:
        self.last = began_at
        self._local_rank = local_rank
        self._has_written = False
        self._recent = b""
        self._on_output = on_output

    def add(self, data: bytes, now: float) -> None:
        """Take note of output, which may come in pieces of any size."""
        self._recent = (self._recent + data[-_KEPT:])[-_KEPT:]
        silence, self.last = now - self.last, now
        if not self._has_written:
            self._has_written = True
            self._on_output(self._local_rank, None)
        if silence >= SILENCE:
            self._on_output(self._local_rank, silence)

    @property
    def last_line(self) -> str:
        """The last line that isn't blank, or its end; empty before the first output."""
        return last_line(self._recent)


def last_line(data: bytes) -> str:
    """Return the last line of some output that isn't blank, or an empty string."""
    lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


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


def pass_on_elsewhere(targets: Mapping[int, Sequence[int]], *, is_exec: bool) -> int:
    """Start a process that copies what comes to each reading end to its targets; return the process's session.

    A background process that writes into a pipe without a reader gets SIGPIPE. The copying process lives until the last
    of them has ended, and holds the launcher's stdout or stderr open, as they do themselves under torch. It is a fork
    if the launcher is the whole process, and exec'd inside a program that has an interpreter, and never its child.
    """
    interpreter = ""
    if is_exec:
        from elastic_run.multiprocessing.fork_exec import find_interpreter

        interpreter = find_interpreter()
    pid = _spawn(interpreter, targets) if interpreter else os.fork()
    if not pid:
        try:
            os.setsid()
            _run(targets)
        finally:
            os._exit(0)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # another part of this program was quicker
    return pid


def _spawn(interpreter: str, targets: Mapping[int, Sequence[int]]) -> int:
    from elastic_run.multiprocessing.fork_exec import inheritable_descriptors, start_process

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    words = [f"{reading}:{','.join(map(str, fds))}" for reading, fds in targets.items()]
    kept = {fd for reading, fds in targets.items() for fd in (reading, *fds)} - {STDOUT, STDERR}
    closed = [fd for fd in inheritable_descriptors() if fd not in kept]
    argv = [interpreter, "-I", "-S", "-c", _CODE, root, *words]
    return start_process(argv, os.environ, closed=closed, kept=sorted(kept))


def main() -> None:
    """Run as a fresh interpreter: each argument is a reading end and its targets, as `READING:TARGET,TARGET`."""
    pairs = [word.partition(":") for word in sys.argv[2:]]
    _run({int(reading): [int(fd) for fd in fds.split(",")] for reading, _, fds in pairs})


def _run(targets: Mapping[int, Sequence[int]]) -> None:
    """In the new process: fork once more, so that the launcher is not its parent, and copy until all have ended."""
    from elastic_run.multiprocessing.guardian import become_daemon

    if os.fork():
        return
    kept = {fd for reading, fds in targets.items() for fd in (reading, *fds)}
    become_daemon("output of background processes", "output", kept)
    poll, left = select.poll(), {reading: [*fds] for reading, fds in targets.items()}
    for reading in left:
        poll.register(reading, select.POLLIN)
    while left:
        for reading, _ in poll.poll():
            try:
                data = os.read(reading, _READ_SIZE)
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
