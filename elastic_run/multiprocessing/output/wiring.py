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
from elastic_run.multiprocessing.process.fork_exec import allowed_descriptors
from elastic_run.multiprocessing.process.stack_pipe import LOWEST_DESCRIPTOR, StackPipe
from elastic_run.records import dataclass

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
    #: Descriptor of the log file that the launcher writes, or -1, and its path.
    file: int = -1
    path: str = ""
    is_terminal: bool = False


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
        #: Local ranks whose two streams are one channel.
        self._joint: set[int] = set()

    def open(
        self,
        local_rank: int,
        *,
        stdout: str,
        stderr: str,
        tee_stdout: bool = False,
        tee_stderr: bool = False,
        kept_stdout: str = "",
        kept_stderr: str = "",
    ) -> tuple[int, int]:
        """Return a worker's descriptors 1 and 2, which stay open here until `started`.

        Args:
            local_rank: The worker's number on this node.
            stdout: Path of the log file of stdout, or "" for the console.
            stderr: Path of the log file of stderr, or "" for the console.
            tee_stdout: Whether stdout goes to the console too.
            tee_stderr: Whether stderr does.
            kept_stdout: File for a copy of stdout that the console shows or hides, or "".
            kept_stderr: File for a copy of stderr that the console shows or hides, or "".

        Raises:
            OSError: There are no descriptors left.
        """
        self.lines[local_rank] = []
        self._writing[local_rank] = []
        try:
            if self._is_shared and not (stdout or stderr or tee_stdout or tee_stderr):
                both = self._open_captured(local_rank, STDERR, kept_stdout)
                if kept_stderr and both != STDERR:
                    try:
                        os.symlink(os.path.basename(kept_stdout), kept_stderr)
                    except OSError:
                        pass  # a file system without links: the file of the other stream has it all
                self._joint.add(local_rank)
                return (both, both) if both != STDERR else (STDOUT, STDERR)
            out = self._open_one(local_rank, STDOUT, stdout, tee=tee_stdout, kept=kept_stdout)
            err = self._open_one(local_rank, STDERR, stderr, tee=tee_stderr, kept=kept_stderr)
        except OSError:
            self.started(local_rank)
            self.abandon(local_rank)
            raise
        return out, err

    def takes_stdout(self, local_rank: int) -> bool:
        """Whether a worker's stdout passes through the launcher, alone or in one channel with its stderr."""
        return local_rank in self._joint or any(line.fd == STDOUT for line in self.lines.get(local_rank, ()))

    def open_stacks(self, local_rank: int) -> int:
        """Return the descriptor for a worker's stacks, which it gets under the same number; call it after `open`.

        -1 if there is no descriptor left: the worker runs without it.
        """
        try:
            reading, writing = open_pipe(is_large=False)
        except OSError:
            return -1
        try:
            high = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, min(LOWEST_DESCRIPTOR, allowed_descriptors() // 2))
        except OSError:  # there is no such number
            os.close(reading)
            return -1
        finally:
            os.close(writing)
        self.stacks[local_rank] = StackPipe(reading, high)
        self._writing[local_rank].append(high)
        return high

    def launcher_ends(self) -> list[int]:
        """Return the launcher's descriptors of all wired workers, which a forked worker closes."""
        lines = [line for each in self.lines.values() for line in each]
        stacks = [pipe.reading for pipe in self.stacks.values()]
        return [*(fd for line in lines for fd in (line.reading, line.file) if fd >= 0), *stacks]

    def started(self, local_rank: int) -> None:
        """Close this process's copies of the worker's descriptors, also if the start has failed."""
        for end in self._writing.pop(local_rank, ()):
            os.close(end)

    def abandon(self, local_rank: int) -> None:
        """Close the launcher's ends of a worker whose output will not be read."""
        for line in self.lines.pop(local_rank, ()):
            os.close(line.reading)
            if line.file >= 0:
                os.close(line.file)
        if local_rank in self.stacks:
            os.close(self.stacks.pop(local_rank).reading)

    def close_stacks(self) -> None:
        """Close the pipes for stacks that were not asked for."""
        for pipe in self.stacks.values():
            os.close(pipe.reading)
        self.stacks.clear()

    def _open_one(self, local_rank: int, fd: int, path: str, *, tee: bool, kept: str = "") -> int:
        if tee:
            return self._open_tee(local_rank, fd, path)
        if kept and path and self._capture:
            path = kept  # not shown
        if path and (path != os.devnull or fd == STDOUT or not self._capture):
            return self._open_redirect(local_rank, fd, path)
        if path:
            reading, writing = self._open_pipe()
            self._keep(local_rank, Line(STDERR, MUTED, reading), writing)
            return writing
        return self._open_captured(local_rank, fd, kept) if self._is_captured(fd) else fd

    def _is_captured(self, fd: int) -> bool:
        return self._capture and (fd == STDERR or self._is_shared or self.is_stdout_passed)

    def _open_tee(self, local_rank: int, fd: int, path: str) -> int:
        reading, writing = self._open_pipe()
        # Kept before the file is opened: should that fail, both ends are closed with the worker's others.
        line = Line(fd, TEED, reading, path=path)
        self._keep(local_rank, line, writing)
        if is_log(path):
            line.file = self._open_file(path)
        return writing

    def _open_redirect(self, local_rank: int, fd: int, path: str) -> int:
        end = self._open_file(path)
        if end < 0:
            return self._open_one(local_rank, fd, "", tee=False)
        if fd == STDERR:
            self.redirects[local_rank] = path
        self._writing[local_rank].append(end)
        return end

    def _open_captured(self, local_rank: int, fd: int, kept: str) -> int:
        is_terminal = os.isatty(fd)
        try:
            reading, writing = open_terminal(fd) if is_terminal else self._open_pipe()
        except OSError as error:
            if is_out_of_descriptors(error) or not is_terminal:
                raise
            return fd  # no pseudo-terminal to be had: better no tail than a worker without colours
        line = Line(fd, CAPTURED, reading, path=kept, is_terminal=is_terminal)
        self._keep(local_rank, line, writing)
        if kept:
            line.file = self._open_file(kept)
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

    def _keep(self, local_rank: int, line: Line, writing: int) -> None:
        self.lines[local_rank].append(line)
        self._writing[local_rank].append(writing)


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


def is_log(path: str) -> bool:
    """Whether a path of `LogsDest` is a log file: an empty path is the console, and the null device keeps nothing."""
    return path not in ("", os.devnull)


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
