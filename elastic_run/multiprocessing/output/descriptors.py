r"""Descriptors that a worker may write to: pipes and pseudo-terminals that the launcher reads, and log files.

A pseudo-terminal is used where the launcher's stderr is a terminal, so that workers see one too: progress bars and
colours stay. It is raw: the worker's bytes come out unchanged, and the real terminal translates ``\n`` itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys

from elastic_run.new_files import open_own

STDOUT = 1
STDERR = 2

_PIPE_SIZE = 1 << 20
#: `struct winsize`: rows, columns, width and height in pixels, all unsigned short.
_WINDOW_SIZE_BYTES = 8


def open_pipe(*, is_large: bool) -> tuple[int, int]:
    """Open a pipe.

    Args:
        is_large: Whether to ask for 1 MiB, so that a burst doesn't hold the worker up. The kernel bounds what one
            user's pipes may take together, and gives tiny ones beyond that, so not everyone can have a large one.

    Returns:
        The reading end, non-blocking, and the writing end; both closed on exec.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    if is_large:
        try:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        except (AttributeError, OSError):
            pass  # not Linux, or the user's share is used up: 64 KiB do as well
    return reading, writing


def move_up(fd: int, lowest: int) -> int:
    """Give a descriptor another number, `lowest` or the next one that is free; closed on exec.

    Raises:
        OSError: There is no such number; the descriptor keeps its own.
    """
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def open_terminal(model: int) -> tuple[int, int]:
    """Open a raw pseudo-terminal.

    Returns:
        The reading end, non-blocking, and the worker's end; both closed on exec.

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


def bytes_in(pipe: int) -> int:
    """Return how many bytes are in a pipe."""
    import termios

    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


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
