"""The launcher's own stdout and stderr: one owner, never blocks, never mixes lines of its own into others'.

Rules
- `write` takes everything at once and returns; what the reader is too slow for waits in a queue. Over `_FULL` bytes `is_full`
  tells the channels to stop reading their workers, so memory stays bounded and nothing is lost.
- The descriptors may be shared with other programs, whose flags are not ours to change: O_NONBLOCK belongs to the open
  file. So each pipe or terminal is opened once more through /proc/self/fd, which gives an open file of our own. Where that
  is refused (a socket, somebody else's terminal) at most `_POLITE` bytes are written when the kernel says that they fit.
- A reader that has gone (EPIPE, EIO) closes that stream: one notice on the other one, further data is dropped, the workers
  go on. A full disk loses what doesn't fit, with one notice, and is tried again with the next data.
- Where 1 and 2 are the same open file they share one queue, so their order stays.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop

_STDOUT, _STDERR = 1, 2
_FULL = 1 << 20
#: Bytes that a pipe which polls writable takes without blocking: one page, PIPE_BUF.
_POLITE = 4096
_CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENXIO)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ensure_standard_descriptors() -> None:
    """Open /dev/null on each of 0, 1 and 2 that is closed, so that no other file gets one of these numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)


def is_same_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same file, as 1 and 2 do after `2>&1`."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)


class Sink:
    """One open file that is written without blocking.

    Args:
        loop: The agent's loop.
        fd: The descriptor, which stays the caller's.
        on_trouble: Called once per kind with the error.
    """

    def __init__(self, loop: Loop, fd: int, *, on_trouble: Callable[[OSError], None]) -> None:
        self._loop = loop
        self._on_trouble = on_trouble
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._waiting: list[Callable[[], None]] = []
        self._has_told_no_space = False
        self.is_closed = False
        self.ends_line = True
        self._is_watched = False
        self._limit = 1 << 30
        self._fd, self._is_own = self._open(fd)

    def _open(self, fd: int) -> tuple[int, bool]:
        try:
            mode = os.fstat(fd).st_mode
        except OSError as error:
            self._close(error)
            return fd, False
        self._is_pollable = not (stat.S_ISREG(mode) or stat.S_ISBLK(mode))
        if not self._is_pollable or os.path.samestat(os.fstat(fd), os.stat(os.devnull)):
            self._is_pollable = False
            return fd, False
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), True
        except OSError:
            self._limit = _POLITE
            return fd, False

    @property
    def is_full(self) -> bool:
        """Whether writers should hold back."""
        return self._queued > _FULL

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._queue

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call once when the sink is not full any more."""
        self._waiting.append(callback)

    def write(self, data: bytes) -> None:
        """Take all of the data; write what fits now, queue the rest."""
        if self.is_closed or not data:
            return
        self.ends_line = data.endswith(b"\n")
        self._queue.append(memoryview(data))
        self._queued += len(data)
        if not self._is_watched:
            self._pump(may_write=self._is_own or not self._is_pollable)

    def _pump(self, *, may_write: bool = True) -> None:
        while self._queue and may_write:
            chunk = self._queue[0]
            try:
                written = os.write(self._fd, chunk[: self._limit])
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(error)
                return
            self._queued -= written
            if written == len(chunk):
                self._queue.popleft()
            else:
                self._queue[0] = chunk[written:]
            may_write = self._limit != _POLITE
        self._watch(bool(self._queue))
        self._tell_room()

    def _watch(self, wanted: bool) -> None:  # noqa: FBT001
        if wanted and not self._is_watched:
            self._loop.add_writer(self._fd, self._pump)
        elif not wanted and self._is_watched:
            self._loop.remove_writer(self._fd)
        self._is_watched = wanted

    def _tell_room(self) -> None:
        if self._waiting and not self.is_full:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def _fail(self, error: OSError) -> None:
        self._queue.clear()
        self._queued = 0
        self._watch(wanted=False)
        if error.errno in _NO_SPACE:
            if not self._has_told_no_space:
                self._has_told_no_space = True
                self._on_trouble(error)
        elif error.errno in _CLOSED:
            self._close(error)
        else:
            raise error
        self._tell_room()

    def _close(self, error: OSError) -> None:
        self.is_closed = True
        self._is_pollable = False
        self._on_trouble(error)

    def close(self) -> None:
        """Stop; what is still queued is dropped."""
        self._queue.clear()
        self._watch(wanted=False)
        if self._is_own:
            os.close(self._fd)
            self._is_own = False
        self.is_closed = True


class Console:
    """The launcher's stdout and stderr.

    Args:
        loop: The agent's loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sinks: dict[int, Sink] = {}
        self._sinks[_STDERR] = Sink(loop, _STDERR, on_trouble=lambda error: self._tell_trouble(_STDERR, error))
        if is_same_file(_STDOUT, _STDERR):
            self._sinks[_STDOUT] = self._sinks[_STDERR]
        else:
            self._sinks[_STDOUT] = Sink(loop, _STDOUT, on_trouble=lambda error: self._tell_trouble(_STDOUT, error))

    def write(self, fd: int, data: bytes) -> None:
        """Write without blocking.

        Args:
            fd: 1 or 2.
            data: Any bytes.
        """
        self._sinks[fd].write(data)

    def say(self, text: str) -> None:
        """Print one line of the launcher's own on stderr, never inside another line."""
        sink = self._sinks[_STDERR]
        lead = "" if sink.ends_line else "\n"
        sink.write(f"{lead}elastic-run: {text}\n".encode(errors="backslashreplace"))

    def is_full(self, fd: int) -> bool:
        """Whether the reader of 1 or 2 is so slow that channels should hold back."""
        return self._sinks[fd].is_full

    def on_room(self, fd: int, callback: Callable[[], None]) -> None:
        """Call once when the reader of 1 or 2 has caught up."""
        self._sinks[fd].on_room(callback)

    def flush(self, deadline: float | None = None) -> None:
        """Run the loop until everything is written.

        Args:
            deadline: Monotonic seconds after which to give up; None waits as long as the reader lives.
        """
        self._loop.run_until(lambda: all(sink.is_empty for sink in self._sinks.values()), deadline)

    def close(self) -> None:
        """Let the descriptors go; what is not flushed is lost."""
        for sink in set(self._sinks.values()):
            sink.close()

    def _tell_trouble(self, fd: int, error: OSError) -> None:
        name, other = ("stdout", _STDERR) if fd == _STDOUT else ("stderr", _STDOUT)
        if other not in self._sinks or self._sinks[other] is self._sinks.get(fd):
            return
        if error.errno in _NO_SPACE:
            text = f"{name}: {error.strerror}; what doesn't fit is lost, the job goes on"
        else:
            text = f"{name} is closed by its reader; the job goes on without it"
        if other == _STDERR:
            self.say(text)
