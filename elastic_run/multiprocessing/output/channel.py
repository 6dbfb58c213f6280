"""One worker's stream on its way to the console: capture unchanged, or tee line by line.

Rules
- Capture passes bytes on as they come, so that prompts, progress bars and colours stay, and keeps the last bytes.
- Tee writes every byte to its file as it is, and whole lines to the console, each behind its prefix: lines of several ranks
  never mix. A line without an end waits for it; at the end of the worker it gets a newline on the console only.
- A line longer than `_LONGEST` reaches the console in pieces, each behind its prefix, so that memory stays bounded; the file
  has it whole.
- A channel that the console is too slow for stops reading, and its worker waits: nothing is dropped.
"""

from __future__ import annotations

import errno
import os

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

_READ = 1 << 18
_LONGEST = 1 << 20


class Tail:
    """The last bytes of a stream."""

    __slots__ = ("_chunks", "_size")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._chunks.append(data[-contract.CAPTURE_BYTES :])
        self._size += len(self._chunks[-1])
        if self._size > 2 * contract.CAPTURE_BYTES:
            self._chunks = [self.read()]
            self._size = len(self._chunks[0])

    def read(self) -> bytes:
        """Return them."""
        return b"".join(self._chunks)[-contract.CAPTURE_BYTES :]


class LogFile:
    """A file that gets a worker's output; when the disk is full the job goes on without it.

    Args:
        path: The file, which is appended to.
        on_trouble: Called once with the path and the error.
    """

    def __init__(self, path: str, *, on_trouble: Callable[[str, OSError], None]) -> None:
        self._path = path
        self._on_trouble = on_trouble
        self._has_told = False
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._tell(error)

    def write(self, data: bytes) -> None:
        """Append."""
        if self._fd < 0:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._has_told:
            self._has_told = True
            self._on_trouble(self._path, error)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Channel:
    """Reads one worker's stream and passes it on.

    Args:
        loop: The agent's loop.
        console: Where it goes.
        fd: The reading end, non-blocking; the channel closes it.
        target: 1 or 2, the console's stream.
    """

    def __init__(self, loop: Loop, console: Console, fd: int, target: int) -> None:
        self._loop = loop
        self._console = console
        self._fd = fd
        self._target = target
        self.tail = Tail()
        loop.add_reader(fd, self._on_readable)

    @property
    def descriptor(self) -> int:
        """The reading end; -1 when it is closed."""
        return self._fd

    def _on_readable(self) -> None:
        if self._console.is_full(self._target):
            self._loop.remove_reader(self._fd)
            self._console.on_room(self._target, self._resume)
        elif not self._read_once():
            self.close()

    def _resume(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_readable)

    def _read_once(self) -> bool:
        """Pass one piece on; return whether there may be more."""
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:  # EIO: the last writer of a terminal has gone
                raise
            return False
        if data:
            self.tail.add(data)
            self._pass_on(data)
        return bool(data)

    def _pass_on(self, data: bytes) -> None:
        self._console.write(self._target, data)

    def finish(self) -> None:
        """Read what is left without waiting for those who still hold the other end, and close."""
        if self._fd >= 0:
            while self._has_more() and self._read_once():
                pass
            self.close()

    def _has_more(self) -> bool:
        import select  # noqa: PLC0415 - loaded by the loop already

        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return any(events & (select.POLLIN | select.POLLHUP) for _, events in poll.poll(0))

    def close(self) -> None:
        """Stop reading."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class TeeChannel(Channel):
    """Reads one worker's stream into a file and, line by line, onto the console.

    Args:
        loop: The agent's loop.
        console: Where lines go.
        fd: The reading end.
        target: 1 or 2.
        file: Where every byte goes.
        prefix: Put before every line on the console.
        duplicate: Gets every prefixed batch of lines too, or None.
    """

    def __init__(
        self,
        loop: Loop,
        console: Console,
        fd: int,
        target: int,
        *,
        file: LogFile,
        prefix: bytes,
        duplicate: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        super().__init__(loop, console, fd, target)
        self._file = file
        self._prefix = prefix
        self._duplicate = duplicate
        self._rest: list[bytes] = []
        self._rest_size = 0

    def _pass_on(self, data: bytes) -> None:
        self._file.write(data)
        end = data.rfind(b"\n") + 1
        if end:
            lines = b"".join((*self._rest, data[:end]))
            self._rest, self._rest_size = [], 0
            self._show(lines)
        if end < len(data):
            self._rest.append(data[end:])
            self._rest_size += len(data) - end
            if self._rest_size >= _LONGEST:
                self._flush_rest()

    def _flush_rest(self) -> None:
        if self._rest:
            line = b"".join(self._rest) + b"\n"
            self._rest, self._rest_size = [], 0
            self._show(line)

    def _show(self, lines: bytes) -> None:
        if self._duplicate is not None:
            self._duplicate(self._prefix, lines)
        if self._prefix:
            # One replace for the whole batch; the last line's end has no line behind it.
            lines = self._prefix + lines[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"
        self._console.write(self._target, lines)

    def close(self) -> None:
        """Show what is left of the last line, and close."""
        if self._fd >= 0:
            self._flush_rest()
            self._file.close()
        super().close()
