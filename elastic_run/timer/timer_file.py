"""The named pipe through which workers tell a server of their timers: the server's end.

Rules
- It is opened for reading and writing: so it never comes to an end when the last client closes it, and to wait for a
  request is to wait for the descriptor.
- Clients write one line of JSON at a time, shorter than PIPE_BUF: whole lines arrive. What else arrives is counted,
  told once, and dropped.
- A pipe that another server reads is never taken from it: a lock on the directory (flock) lets one agent at a time make
  or remove a pipe there. Agents hold the lock for less than a millisecond. In a shared directory, a process of another
  user can hold it for ever. So an agent waits one second for the lock, and then goes on without it. In this case, two
  agents that start at the same moment with the same path may both make a pipe.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from contextlib import contextmanager

from elastic_run.timer.requests import read_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_run.timer.requests import FileTimerRequest

_CHUNK = 1 << 16
_MOST_CHUNKS = 16
#: Bytes without an end of line that are kept; no request is as long.
_MOST = 1 << 16
_SHOWN = 80
#: Attempts to get the lock on a directory, and the seconds between two of them.
_LOCK_TRIES = 100
_LOCK_PAUSE = 0.01


class TimerFile:
    """A named pipe that this process reads.

    Args:
        path: Where it is to be; an empty file or a pipe that nobody reads is replaced.
        say: Is told, once, what is wrong with a line that is no request.

    Raises:
        OSError: It can't be made; FileExistsError where something else stands there.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say
        self._has_said = False
        self._rest = b""
        with _alone(self.path):
            make_pipe(self.path)
            self.fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self._identity = (status.st_dev, status.st_ino)

    def read(self) -> list[FileTimerRequest]:
        """Return the requests that are there, of very many a part; never waits."""
        found = []
        for line in self._lines():
            try:
                found.append(read_request(line))
            except ValueError as error:
                self._tell(line, str(error))
        return found

    def _lines(self) -> list[bytes]:
        chunks = [self._rest]
        # No more than the pipe can hold at a time: a client that never stops to write must not keep us here.
        for _ in range(_MOST_CHUNKS):
            try:
                chunks.append(os.read(self.fd, _CHUNK))
            except BlockingIOError:
                break
        *lines, self._rest = b"".join(chunks).split(b"\n")
        if len(self._rest) > _MOST:
            self._tell(self._rest, "too long")
            self._rest = b""
        return [line for line in lines if line.strip()]

    def _tell(self, line: bytes, reason: str) -> None:
        if self._has_said:
            return
        self._has_said = True
        shown = ascii(line[:_SHOWN].decode(errors="replace"))
        self.say(f"{self.path}: a line there is not a timer request, and is ignored ({reason}): {shown}")

    def close(self) -> None:
        """Close and remove the pipe; harmless when that was done."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            with _alone(self.path):
                status = os.stat(self.path)
                if (status.st_dev, status.st_ino) == self._identity:
                    os.unlink(self.path)
        except OSError:
            pass  # another process has removed it, or has put a file there


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Let one process at a time make, open or remove a pipe in a directory: two agents may be given the same path."""
    try:
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # there is no such directory, or it can't be read: what follows says so where it matters
        return
    try:
        _lock(directory)
        yield
    finally:
        os.close(directory)


def _lock(directory: int) -> None:
    """Lock a directory, unless another process keeps it locked."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE)  # a wait for a lock has no deadline
        except OSError:
            return  # a file system without locks
        else:
            return


def make_pipe(path: str) -> None:
    """Make a named pipe that only this user can open.

    Args:
        path: Where; an empty file or a pipe that nobody reads is replaced.

    Raises:
        OSError: It can't be made; FileExistsError where something else stands there.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        is_empty = stat.S_ISREG(status.st_mode) and not status.st_size
        if not is_empty and not stat.S_ISFIFO(status.st_mode):
            reason = "the timers' pipe can't be made: something else stands there"
            raise FileExistsError(17, reason, path)
        if has_reader(path):
            reason = "the timers' pipe can't be made: another timer server reads there"
            raise FileExistsError(17, reason, path)
        os.unlink(path)
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        reason = f"the timers' pipe can't be made: {error.strerror}"
        raise OSError(error.errno, reason, path) from error


def has_reader(path: str) -> bool:
    """Whether a process reads a named pipe."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def write_line(path: str, line: bytes, wait_limit: float) -> None:
    """Write a line into a named pipe at once and whole.

    Args:
        path: The pipe.
        line: The line, with its end, no longer than PIPE_BUF.
        wait_limit: Seconds to wait at most while the pipe is full.

    Raises:
        OSError: Nobody reads there, or the pipe stays full (BlockingIOError).
    """
    # Without O_NONBLOCK this would wait for a server that may never come.
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        poll.poll(wait_limit * 1000)
        os.write(fd, line)
    finally:
        os.close(fd)
