"""Where the bytes of a stream end: a descriptor of the console that others share, or a log file.

O_NONBLOCK belongs to the open file description, which the user's shell and the workers share: if this process set it,
*their* writes would fail. So the method depends on the kind of file:
- pipe or terminal: an open file description of this process, by opening /proc/self/fd/N again;
- socket, and pipe or terminal that can't be opened again (after `su`, in a container as another user, without /proc):
  after each POLLOUT only as many bytes as surely fit. A writable pipe or socket takes PIPE_BUF bytes. A writable
  terminal has a free buffer of 256 bytes. It takes characters up to the next one that it may change (a newline becomes
  two bytes) in one piece, and then waits if no buffer is free any more (Linux, drivers/tty/n_tty.c,
  process_output_block). So such a character is a step of its own;
- regular file or other device: written directly. A file that is opened again would begin at offset 0 and overwrite the
  content. A disk that is slow does hold the loop up: the kernel has no way of writing a file without waiting when its
  cache is full of dirty pages, short of a thread.
"""

from __future__ import annotations

import os
import select
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TERMINAL_STEP = rb"[^\b\t\n\r]{1,128}|[\b\t\n\r]"


def open_sink(fd: int, on_loss: Callable[[OSError], None]) -> Sink:
    """Choose the way of writing to a shared descriptor without blocking; the descriptor stays open and in its mode.

    `on_loss` is called once when a file can't take more (a full disk).
    """
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return LogFile(os.dup(fd), on_loss)
    try:
        return Sink(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return CautiousSink(fd)  # a socket, too, and where no descriptor is left


class Sink:
    """A non-blocking descriptor of our own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what fits, at least one byte, and return how many bytes were taken.

        Raises:
            BlockingIOError: Nothing fits now.
            OSError: Nobody will ever read it.
        """
        return os.write(self.fd, data)

    def close(self) -> None:
        """Close the descriptor; harmless when it is closed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CautiousSink(Sink):
    """A blocking descriptor that is not ours, given only what it surely takes."""

    def __init__(self, fd: int) -> None:
        import re

        super().__init__(fd)
        self._step = re.compile(_TERMINAL_STEP) if os.isatty(fd) else None
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def close(self) -> None:
        """Leave the descriptor open."""
        self.fd = -1

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what fits, see `Sink.write`."""
        view = memoryview(data)
        done = 0
        while done < len(view) and self._poll.poll(0):
            found = None if self._step is None else self._step.match(view, done)
            try:
                done += os.write(self.fd, view[done : done + select.PIPE_BUF if found is None else found.end()])
            except BlockingIOError:
                break  # somebody has set O_NONBLOCK, and others were quicker to take the room
        if not done:
            raise BlockingIOError
        return done


class LogFile(Sink):
    """A file that takes all it can, on a disk that may be full.

    A write that fails never raises and never stops the job: the loss is told once, and what can't be written is
    counted. Later data is tried again; a line in the file says then how much is missing in front of it.
    """

    def __init__(self, fd: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(fd)
        self.lost = 0
        self._on_loss: Callable[[OSError], None] | None = on_loss

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append data, or count it as lost; it is all taken."""
        done = 0
        try:
            if self.lost:
                os.write(self.fd, b"\nelastic-run: %d bytes are missing here, they could not be written\n" % self.lost)
                self.lost = 0
            done = os.write(self.fd, data)
            while done < len(data):
                done += os.write(self.fd, memoryview(data)[done:])
        except OSError as error:
            self.lost += len(data) - done
            if self._on_loss is not None:
                on_loss, self._on_loss = self._on_loss, None
                on_loss(error)
        return len(data)


class FilteredCopy:
    """A file of --duplicate-stdout-filters or --duplicate-stderr-filters: lines of all tee'd ranks that hold a text.

    Each line stands after its rank's prefix. Of a line longer than the limit of tee'd lines each part counts as a line.
    """

    def __init__(self, file: LogFile, filters: Iterable[str]) -> None:
        self._file = file
        self._needles = tuple(text.encode("utf-8", "surrogateescape") for text in filters)

    def add(self, prefix: bytes, piece: bytes) -> None:
        """Look through the next lines of a source."""
        if self._has_any(piece):  # of most pieces no line is wanted
            lines = piece.removesuffix(b"\n").split(b"\n")
            self._file.write(b"".join([prefix + line + b"\n" for line in lines if self._has_any(line)]))

    def _has_any(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Backlog:
    """The part of a worker's stream that the console has not shown yet, for a stream that also goes to a log file.

    Only positions in the file are remembered, so the launcher's memory does not grow. The worker does not wait for a
    console that is stuck or slow: it writes on, its file is complete at any time, and the console catches up from the
    file, as under torchrun. Bytes that can't be written to the file (its disk is full, it is a device) are kept in
    memory; then the worker waits. Bytes that another process appends to the file are not shown: the position of each
    read is noted after it was written.
    """

    def __init__(self, file: LogFile) -> None:
        self._file = file
        #: Ranges of the file, first byte and the one after the last, and what isn't in it.
        self._pieces: list[range | bytes] = []
        self._fd = -1
        try:
            if stat.S_ISREG(os.fstat(file.fd).st_mode):
                # The same file, wherever it is moved to, or if it is deleted.
                self._fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # no /proc, or a file that we may only write

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._pieces)

    @property
    def is_sound(self) -> bool:
        """Whether more may be added without taking memory."""
        return self._fd >= 0 and not self._file.lost

    def add(self, data: bytes, *, is_new: bool = True) -> None:
        """Append what was just written to the file; if other bytes were written behind it, it is kept in memory."""
        if not is_new or not self.is_sound:
            self._pieces.append(data)
            return
        end = os.lseek(self._file.fd, 0, os.SEEK_CUR)
        start = end - len(data)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, range) and last.stop == start:
            self._pieces[-1] = range(last.start, end)
        else:
            self._pieces.append(range(start, end))

    def take(self, size: int) -> bytes:
        """Return at least one byte from the front; nothing may wait any more after that."""
        first = self._pieces.pop(0)
        if isinstance(first, bytes):
            return first
        place = first[:size]
        try:
            data = os.pread(self._fd, len(place), place.start)
        except OSError:
            data = b""
        if not data:  # another process has truncated the file (logrotate's copytruncate)
            return b"\nelastic-run: %d bytes are missing here, the log file has them no more\n" % len(first)
        if len(data) < len(first):
            self._pieces.insert(0, first[len(data) :])
        return data

    def close(self) -> None:
        """Forget what waits, and close the descriptor; harmless when it is closed."""
        self._pieces.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
