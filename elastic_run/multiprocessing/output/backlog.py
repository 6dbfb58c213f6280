"""The part of a worker's stream that the console has not shown yet, for a stream that also goes to a log file.

Rules
- Only the position in the file is remembered, so the launcher's memory does not grow. The worker does not wait for a
  console that is stuck or slow: it writes on, its file is complete at any time, and the console catches up from the
  file. torchrun does the same.
- Bytes that can't be written to the file (its disk is full, it is a device) are kept in memory; then the worker waits.
- Bytes that another process appends to the file are not shown: the position of each read is noted after it was written.
- Another process may truncate the file (logrotate's copytruncate). Then the console tells how many bytes are missing,
  even if the file has grown again.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.output.logfile import LogFile


class Backlog:
    """A queue of bytes that stand in a log file."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._fd = -1
        #: Ranges of the file, first byte and the one after the last, and what isn't in it.
        self._pieces: list[range | bytes] = []
        self._is_readable: bool | None = None

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._pieces)

    @property
    def is_sound(self) -> bool:
        """Whether more may be added without taking memory."""
        if self._is_readable is None:
            self._is_readable = self._open()
        return self._is_readable and not self._file.lost and not (self._pieces and isinstance(self._pieces[-1], bytes))

    def _open(self) -> bool:
        """Open the file to read: the same one, wherever it was moved to, or if it was deleted."""
        try:
            if stat.S_ISREG(os.fstat(self._file.fd).st_mode):
                self._fd = os.open(f"/proc/self/fd/{self._file.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # no /proc, or a file that we may only write
        return self._fd >= 0

    def add(self, data: bytes) -> None:
        """Append what was just written to the file."""
        if not self.is_sound:
            self._pieces.append(data)
            return
        end = os.lseek(self._file.fd, 0, os.SEEK_CUR)
        start = end - len(data)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, range) and last.stop > start:
            self._give_up(start)
            last = None
        if isinstance(last, range) and last.stop == start:
            self._pieces[-1] = range(last.start, end)
        else:
            self._pieces.append(range(start, end))

    def _give_up(self, place: int) -> None:
        """Forget what stood in the file from a place on, where other bytes are now."""
        left = [_cut(piece, place) if isinstance(piece, range) else piece for piece in self._pieces]
        lost = sum(map(len, self._pieces)) - sum(map(len, left))
        self._pieces = list(filter(None, left))
        self._pieces.append(_tell_missing(lost))

    def take(self, size: int) -> bytes:
        """Take from the front.

        Returns:
            The bytes, at least one; nothing may wait any more.
        """
        first = self._pieces.pop(0)
        if isinstance(first, bytes):
            return first
        data = self._read(first[:size])
        if not data:
            return _tell_missing(len(first))
        if len(data) < len(first):
            self._pieces.insert(0, first[len(data) :])
        return data

    def _read(self, place: range) -> bytes:
        try:
            return os.pread(self._fd, len(place), place.start)
        except OSError:
            return b""

    def close(self) -> None:
        """Forget what waits, and close the descriptor; harmless when it is closed."""
        self._pieces.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._is_readable = False


def _cut(piece: range, place: int) -> range:
    return range(piece.start, min(piece.stop, max(piece.start, place)))


def _tell_missing(count: int) -> bytes:
    return b"\nelastic-run: %d bytes are missing here, the log file has them no more\n" % count
