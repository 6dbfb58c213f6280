"""Writes to a descriptor that other processes share, and never blocks.

O_NONBLOCK belongs to the open file description, which the user's shell and the workers share: if this process set it,
*their* writes would fail. So the method depends on the kind of file:
- pipe or terminal: an open file description of this process, by opening /proc/self/fd/N again;
- pipe or terminal that can't be opened again (after `su`, in a container as another user, without /proc): after each
  POLLOUT only as many bytes as surely fit. A writable pipe takes PIPE_BUF bytes. A writable terminal has a free buffer
  of 256 bytes. It takes characters up to the next one that it may change (a newline becomes two bytes) in one piece,
  and then waits if no buffer is free any more (Linux, drivers/tty/n_tty.c, process_output_block). So such a character
  is a step of its own;
- socket: MSG_DONTWAIT for each call;
- regular file or other device: written directly, since the write never blocks for long. A file that is opened again
  would begin at offset 0 and overwrite the content.
"""

from __future__ import annotations

import os
import select
import stat

from elastic_run.multiprocessing.output.logfile import LogFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PIPE_STEP = select.PIPE_BUF
_TERMINAL_STEP = rb"[^\b\t\n\r]{1,128}|[\b\t\n\r]"


class Sink:
    """A non-blocking descriptor of our own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what fits.

        Returns:
            How many of them were taken, at least one.

        Raises:
            BlockingIOError: Nothing fits now.
            OSError: Nobody will ever read it.
        """
        return os.write(self.fd, data)

    def close(self) -> None:
        """Close what is ours; harmless when it is closed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CautiousSink(Sink):
    """A blocking descriptor of somebody else's, given only what it surely takes."""

    def __init__(self, fd: int) -> None:
        import re

        super().__init__(fd)
        self._step = re.compile(_TERMINAL_STEP) if os.isatty(fd) else None
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what fits, see `Sink.write`."""
        view = memoryview(data)
        done = 0
        while done < len(view) and (size := self._write_step(view[done : self._find_step_end(view, done)])):
            done += size
        if not done:
            raise BlockingIOError
        return done

    def _find_step_end(self, view: memoryview, start: int) -> int:
        found = None if self._step is None else self._step.match(view, start)
        return start + _PIPE_STEP if found is None else found.end()

    def _write_step(self, piece: memoryview) -> int:
        """Write what surely fits; return 0 when nothing does."""
        try:
            return os.write(self.fd, piece) if self._poll.poll(0) else 0
        except BlockingIOError:
            return 0  # somebody has set O_NONBLOCK, and others were quicker to take the room

    def close(self) -> None:
        """Leave the descriptor to its owner."""


class SocketSink(Sink):
    """A socket, written to with a flag instead of a mode."""

    def __init__(self, fd: int) -> None:
        import socket

        is_blocking = os.get_blocking(fd)
        self._socket = socket.socket(fileno=os.dup(fd))
        os.set_blocking(fd, is_blocking)  # all who share it lose that where the program has a default timeout
        self._flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
        super().__init__(self._socket.fileno())

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what fits, see `Sink.write`."""
        return self._socket.send(data, self._flags)

    def close(self) -> None:
        """Close our duplicate."""
        self._socket.close()


class FileSink(Sink):
    """A file, which takes everything or loses it."""

    def __init__(self, fd: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(fd)
        self._file = LogFile(fd, on_loss)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all; what can't be written is counted by the `LogFile`."""
        self._file.write(memoryview(data))
        return len(data)

    def close(self) -> None:
        """Leave the descriptor to its owner."""


def open_sink(fd: int, on_loss: Callable[[OSError], None]) -> Sink:
    """Find the way of writing to a descriptor without blocking.

    Args:
        fd: Shared with others, stays open and in the mode it is in.
        on_loss: Called once when a file can't take more (a full disk).

    Returns:
        The sink.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return SocketSink(fd)
    if not (stat.S_ISFIFO(mode) or os.isatty(fd)):
        return FileSink(fd, on_loss)
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        return Sink(own)
    except OSError:
        return CautiousSink(fd)
