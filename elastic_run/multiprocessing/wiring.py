"""The descriptors that each worker of a round gets for its output; only these are opened before the worker starts.

Each of a worker's stdout and stderr is one of
- inherited: the launcher's own descriptor (stdout on the console; with --no-capture stderr too);
- redirected: a file that the worker writes itself;
- tee'd: a pipe; the launcher writes the file, and whole lines with a prefix to the console;
- captured (stderr on the console): a pipe or, if the launcher's stderr is a terminal, a raw pseudo-terminal, so that
  progress bars and colours stay; the launcher passes every byte on unchanged and keeps the end for the report. Stdout
  is captured too if the launcher itself writes to its place: if stdout and stderr are the same file, or if another
  worker's stdout is tee'd; and if several workers share a file or a pipe. Otherwise two writers would tear each other's
  lines. If both streams of a worker go to the same file, they are one channel, so that they keep their order. With
  --log-dir alone, all shown output is captured, and the launcher writes it to a file as well. A channel of both streams
  goes to the file of stdout; the file of stderr is a link to it;
- muted (stderr of a rank that --local-ranks-filter leaves out): a pipe of which only the end is kept, for the report.

`worker_output` reads the pipes; it is imported while the workers start. Redirects and tee append to existing files, and
never truncate them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from elastic_run.files import open_own
from elastic_run.multiprocessing.fork_exec import LOWEST_STACK_DESCRIPTOR, StackPipe, allowed_descriptors
from elastic_run.multiprocessing.logs import is_log
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.logs import LogsDest

STDOUT = 1
STDERR = 2

#: What a line is for.
CAPTURED = "captured"
TEED = "teed"
MUTED = "muted"

_PIPE_SIZE = 1 << 20
#: Pipes that may have 1 MiB: what they hold when the workers die has to fit into memory.
_LARGE_PIPES = 16
#: `struct winsize`: rows, columns, width and height in pixels, all unsigned short.
_WINDOW_SIZE_BYTES = 8


@dataclass(slots=True)
class Line:
    """The launcher's end of one stream of a worker."""

    #: The worker's descriptor, 1 or 2.
    fd: int
    #: `CAPTURED`, `TEED` or `MUTED`.
    purpose: str
    reading: int
    #: Path of the log file that the launcher writes, or "", and its descriptor, or -1.
    path: str = ""
    file: int = -1
    is_terminal: bool = False
    #: Whether the worker's stdout comes through it, alone or together with its stderr.
    has_stdout: bool = False


class Wiring:
    """The descriptors of one round's workers, until `WorkerOutput` takes the launcher's ends over.

    `capture` says whether output for the console may pass through the launcher without --tee.
    """

    def __init__(self, *, capture: bool = True) -> None:
        #: The launcher's ends, the paths of redirected stderr, and the pipes for stacks, by local rank.
        self.lines: dict[int, list[Line]] = {}
        self.redirects: dict[int, str] = {}
        self.stacks: dict[int, StackPipe] = {}
        #: Log files that could not be opened, each with the reason; their output goes to the console.
        self.losses: list[tuple[str, OSError]] = []
        #: Whether any worker's stdout is tee'd, kept, or shared with another worker; set before the first `open`.
        self.is_stdout_passed = False
        self._capture = capture
        self._is_shared = capture and is_same_file(STDOUT, STDERR)
        self._writing: dict[int, list[int]] = {}
        self._pipes = 0

    def open(self, local_rank: int, logs: LogsDest) -> tuple[int, int]:
        """Return a worker's descriptors 1 and 2 for the files of its output, which stay open here until `started`.

        Raises:
            OSError: There are no descriptors left.
        """
        self.lines[local_rank] = []
        self._writing[local_rank] = []
        stdout, stderr = logs.stdouts[local_rank], logs.stderrs[local_rank]
        tees = [is_log(paths.get(local_rank, "")) for paths in (logs.tee_stdouts, logs.tee_stderrs)]
        # torch's class, whose instances plug-ins return, doesn't have these fields.
        kept = [getattr(logs, name, {}).get(local_rank, "") for name in ("kept_stdouts", "kept_stderrs")]
        try:
            if self._is_shared and not (stdout or stderr or any(tees)):
                return self._open_joint(local_rank, *kept)
            out = self._open_stream(local_rank, STDOUT, stdout, is_teed=tees[0], kept=kept[0])
            err = self._open_stream(local_rank, STDERR, stderr, is_teed=tees[1], kept=kept[1])
        except OSError:
            self.started(local_rank)
            for end in self.launcher_ends(local_rank):
                os.close(end)
            del self.lines[local_rank]
            raise
        return out, err

    def _open_joint(self, local_rank: int, kept_stdout: str, kept_stderr: str) -> tuple[int, int]:
        both = self._open_captured(local_rank, STDERR, kept_stdout)
        if both == STDERR:
            return STDOUT, STDERR
        self.lines[local_rank][0].has_stdout = True
        if kept_stderr:
            try:
                os.symlink(os.path.basename(kept_stdout), kept_stderr)
            except OSError:
                pass  # a file system without links: the file of the other stream has it all
        return both, both

    def _open_stream(self, local_rank: int, fd: int, path: str, *, is_teed: bool, kept: str) -> int:
        if is_teed:
            return self._add(local_rank, Line(fd, TEED, -1, path), self._open_pipe())
        if kept and path and self._capture:
            path = kept  # not shown
        if path and (path != os.devnull or fd == STDOUT or not self._capture):
            end = self._open_file(path)
            if end >= 0:
                self._writing[local_rank].append(end)
                if fd == STDERR:
                    self.redirects[local_rank] = path
                return end
            path = kept = ""
        if path:
            return self._add(local_rank, Line(fd, MUTED, -1), self._open_pipe())
        if self._capture and (fd == STDERR or self._is_shared or self.is_stdout_passed):
            return self._open_captured(local_rank, fd, kept)
        return fd

    def _open_captured(self, local_rank: int, fd: int, kept: str) -> int:
        is_terminal = os.isatty(fd)
        try:
            ends = open_terminal(fd) if is_terminal else self._open_pipe()
        except OSError as error:
            if is_out_of_descriptors(error) or not is_terminal:
                raise
            return fd  # no pseudo-terminal to be had: better no tail than a worker without colours
        return self._add(local_rank, Line(fd, CAPTURED, -1, kept, is_terminal=is_terminal), ends)

    def _add(self, local_rank: int, line: Line, ends: tuple[int, int]) -> int:
        line.reading, writing = ends
        line.has_stdout = line.fd == STDOUT
        self.lines[local_rank].append(line)
        self._writing[local_rank].append(writing)
        if is_log(line.path):  # last: should it fail, both ends are closed with the worker's others
            line.file = self._open_file(line.path)
        return writing

    def _open_pipe(self) -> tuple[int, int]:
        self._pipes += 1
        return open_pipe(is_large=self._pipes <= _LARGE_PIPES)

    def _open_file(self, path: str) -> int:
        """Open a log file, or note why that can't be done and return -1."""
        try:
            return open_log(path)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            self.losses.append((path, error))
            return -1

    def open_stacks(self, local_rank: int) -> int:
        """Return the descriptor for a worker's stacks, which it gets under the same number; call it after `open`.

        -1 if there is no descriptor left: the worker runs without it.
        """
        try:
            reading, writing = open_pipe(is_large=False)
        except OSError:
            return -1
        try:
            high = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, min(LOWEST_STACK_DESCRIPTOR, allowed_descriptors() // 2))
        except OSError:  # there is no such number
            os.close(reading)
            return -1
        finally:
            os.close(writing)
        self.stacks[local_rank] = StackPipe(reading, high)
        self._writing[local_rank].append(high)
        return high

    def launcher_ends(self, *local_ranks: int) -> list[int]:
        """Return the launcher's descriptors of some workers, or of all wired ones, which a forked worker closes."""
        lines = [line for rank in local_ranks or self.lines for line in self.lines[rank]]
        stacks = [self.stacks[rank].reading for rank in local_ranks or self.stacks if rank in self.stacks]
        return [*(fd for line in lines for fd in (line.reading, line.file) if fd >= 0), *stacks]

    def started(self, local_rank: int) -> None:
        """Close this process's copies of the worker's descriptors, also if the start has failed."""
        for end in self._writing.pop(local_rank, ()):
            os.close(end)

    def close_stacks(self) -> None:
        """Close the pipes for stacks that were not asked for."""
        for pipe in self.stacks.values():
            os.close(pipe.reading)
        self.stacks.clear()


def open_pipe(*, is_large: bool) -> tuple[int, int]:
    """Return the reading end of a pipe, non-blocking, and its writing end; both closed on exec.

    A large one holds 1 MiB, so that a burst doesn't hold the worker up. The kernel bounds what one user's pipes may
    take together, and gives tiny ones beyond that, so not every worker can have a large one.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    if is_large:
        try:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        except (AttributeError, OSError):
            pass  # not Linux, or the user's share is used up: 64 KiB do as well
    return reading, writing


def open_terminal(model: int) -> tuple[int, int]:
    r"""Return the reading end of a raw pseudo-terminal, non-blocking, and the worker's end; both closed on exec.

    It is raw: the worker's bytes come out unchanged, and the real terminal translates ``\n`` itself.

    Raises:
        OSError: There is none to be had (kernel.pty.max, no /dev/pts).
    """
    import termios

    master, slave = os.openpty()
    mode = termios.tcgetattr(slave)
    mode[0] = 0  # input: nothing is typed here
    mode[1] &= ~termios.OPOST
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG | termios.IEXTEN)
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    os.set_blocking(master, False)
    copy_window_size(model, master)
    return master, slave


def copy_window_size(model: int, terminal: int) -> None:
    """Give a terminal the window size of another; does nothing when one is gone."""
    import termios

    try:
        size = fcntl.ioctl(model, termios.TIOCGWINSZ, bytes(_WINDOW_SIZE_BYTES))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    except OSError:
        pass


def open_log(path: str) -> int:
    """Open a file to append to, as `open_own` does."""
    return open_own(path, os.O_WRONLY | os.O_APPEND)


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether an error says nothing of the file that was opened, but that no other could be opened either."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def describe_descriptor(fd: int) -> str:
    """Describe where stream 1 or 2 of the launcher leads, for a sentence: ``elastic-run's stderr, /dev/pts/3``."""
    name = f"elastic-run's {'stdout' if fd == STDOUT else 'stderr'}"
    try:
        place = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return name
    kind = place.partition(":")[0]
    if kind in ("pipe", "socket"):
        return f"{name}, a {kind}"
    return f"{name}, {place!r}" if " " in place else f"{name}, {place}"


def is_read_in_lines(fd: int) -> bool:
    """Whether a descriptor leads to a reader of lines: a file, a pipe or a socket, and no terminal or /dev/null."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def is_same_file(first: int, second: int) -> bool:
    """Whether two descriptors lead to the same place.

    Two openings of one regular file (``> log 2> log``) do: each has an offset of its own, so whoever wrote through
    both would overwrite the one's bytes with the other's.
    """
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
