r"""Writes the lines of the event log, in a thread of its own: no disk holds up the agent's loop.

Rules
- A line is one write to a file that was opened with O_APPEND, so lines of several launchers don't mix on a local file
  system. (NFS has no such append; there each node needs a file of its own, as it has in the log directory.)
- The file may end with a part of a line, because a launcher was killed or the disk was full. Then the next line begins
  with ``\n``. A reader skips the part and empty lines.
- Lines that can't be written are counted, and told once. When the file takes lines again, `lines_lost` comes first.
- The thread waits for lines without a time limit: a job in which nothing happens causes no wake-up.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from _queue import SimpleQueue

from elastic_run.new_files import open_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Lines that wait for a disk that is too slow or full.
_LINES_LIMIT = 10_000
_NEWLINE = b"\n"


def open_event_file(path: str, *, is_own: bool) -> int:
    """Open a file to append lines; make it if it is missing.

    Args:
        path: The file.
        is_own: Whether nobody but this user and root may have made it; a file that the user names may be anybody's.

    Returns:
        The descriptor.

    Raises:
        OSError: The file can't be opened for writing.
    """
    # O_NONBLOCK: a pipe without a reader, or with a slow reader, must not block. It has no effect on a file.
    flags = os.O_APPEND | os.O_NONBLOCK
    opened = open_own if is_own else _open_any
    try:
        return opened(path, os.O_RDWR | flags)
    except PermissionError:
        return opened(path, os.O_WRONLY | flags)


def _open_any(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o666)


class EventFile:
    """One file of events.

    Args:
        path: Path of the file.
        describe_gap: Returns the line that tells how many lines are missing.
        on_loss: Called once, in the writer's thread, with the path and the error of the first line that is lost.
        is_own: See `open_event_file`.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(
        self,
        path: str,
        describe_gap: Callable[[int], bytes],
        on_loss: Callable[[str, OSError], None],
        *,
        is_own: bool = False,
    ) -> None:
        self.path = path
        self._fd = open_event_file(path, is_own=is_own)
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._describe_gap = describe_gap
        self._on_loss: Callable[[str, OSError], None] | None = on_loss
        self._lost = 0
        self._is_torn = False

    def append(self, line: bytes) -> None:
        """Write one line, or count it as lost."""
        try:
            if self._lost:
                self._write(self._describe_gap(self._lost))
                self._lost = 0
            self._write(line)
        except OSError as error:
            self.lose(error)

    def lose(self, error: OSError, lines: int = 1) -> None:
        """Count lines that are not written."""
        self._lost += lines
        if self._on_loss is not None:
            on_loss, self._on_loss = self._on_loss, None
            on_loss(self.path, error)

    def _write(self, line: bytes) -> None:
        data = _NEWLINE + line if self._is_torn or self._ends_within_line() else line
        while data:  # after a part, the second write gives the reason: a full disk, a limit, a full pipe
            data = data[os.write(self._fd, data) :]
            self._is_torn = bool(data)

    def _ends_within_line(self) -> bool:
        if not self._is_regular:
            return False
        try:
            size = os.fstat(self._fd).st_size
            return size > 0 and os.pread(self._fd, 1, size - 1) != _NEWLINE
        except OSError:
            return False  # it may only be written

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class EventWriter:
    """Writes lines to files, in their order and without holding up the caller.

    Args:
        files: Where; they are closed with the writer.
    """

    def __init__(self, files: list[EventFile]) -> None:
        self._files = files
        self._dropped = 0
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Write one line soon.

        Args:
            line: With its newline.
        """
        if self._lines.qsize() < _LINES_LIMIT:
            self._lines.put(line)
        else:
            self._dropped += 1

    def close(self, wait_limit: float) -> None:
        """Write the lines that wait, and close the files.

        Args:
            wait_limit: Seconds after which a slow disk is given up.
        """
        self._lines.put(None)
        self._thread.join(wait_limit)

    def _run(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            dropped, told = self._dropped - told, self._dropped
            for file in self._files:
                if dropped:
                    file.lose(TimeoutError(errno.ETIMEDOUT, "the disk is too slow"), dropped)
                file.append(line)
        for file in self._files:
            file.close()
