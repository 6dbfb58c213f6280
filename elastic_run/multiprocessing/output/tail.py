"""The last bytes of a stream, for the report, and the beginning of a traceback that reaches further back.

An exception may have a message of megabytes (all keys that a checkpoint lacks, a tensor), which stands behind its type
and its frames. So when the last traceback's first line leaves the window, what follows that line is kept as well,
unless so many lines have come since that the program must have lived on.
"""

from __future__ import annotations

import os

from elastic_run import contract

_TRACEBACK = b"Traceback (most recent call last):"
#: Bytes of a traceback that are kept from its first line on.
_HEAD_BYTES = 16 * 1024
#: Lines that may be lost between these and the window, and that the window may have then.
_MOST_LINES = 100
#: Stands for what is lost.
_GAP = b" [...]\n"
#: Bytes of a log file that are looked at.
_FILE_BYTES = 1 << 20


class Tail:
    """Keeps the end of what was added, `contract.CAPTURE_BYTES` of it, and where its last traceback begins."""

    __slots__ = ("_head", "_lost", "_lost_lines", "_pieces")

    def __init__(self) -> None:
        self._pieces = bytearray()
        self._head = bytearray()
        self._lost = self._lost_lines = 0

    def add(self, data: bytes) -> None:
        """Append data, and forget what is too old.

        Args:
            data: The next bytes of the stream.
        """
        self._pieces += data
        if len(self._pieces) > 2 * contract.CAPTURE_BYTES:  # not at every byte: moving the rest down costs
            self._forget()

    def read(self) -> bytes:
        """Return the end of the stream, and before it the beginning of its last traceback."""
        self._forget()
        pieces = bytes(self._pieces)
        if self._lost and _count_lines(pieces) > _MOST_LINES:
            return pieces
        return bytes(self._head) + _GAP * bool(self._lost) + pieces

    def _forget(self) -> None:
        """Let go of what is too old, but for the beginning of a traceback."""
        old = len(self._pieces) - contract.CAPTURE_BYTES
        if old <= 0:
            return
        begins_at = _find_last(self._pieces, old)
        if begins_at >= 0:
            self._head, self._lost, self._lost_lines = self._pieces[begins_at:old], 0, 0
        elif self._head:
            self._head += memoryview(self._pieces)[:old]
        del self._pieces[:old]
        lost = self._head[_HEAD_BYTES:]
        if lost:
            del self._head[_HEAD_BYTES:]
            self._lost += len(lost)
            self._lost_lines += _count_lines(lost)
        if self._lost_lines > _MOST_LINES:
            self._head, self._lost, self._lost_lines = bytearray(), 0, 0


def _find_last(text: bytearray, end: int) -> int:
    """Return where the last traceback begins before a place, or -1; forwards, which takes half the time."""
    found, place = -1, 0
    while place >= 0:
        place = text.find(_TRACEBACK, found + 1, end + len(_TRACEBACK) - 1)
        found = max(found, place)
    return found


def _count_lines(text: bytes | bytearray) -> int:
    """Return how many lines there are; a progress bar ends its own by a carriage return."""
    return text.count(b"\n") + text.count(b"\r")


def read_tail(path: str) -> bytes:
    """Return the end of a file as `Tail` does, or nothing when it can't be read.

    Args:
        path: A log file that a worker wrote itself.

    Returns:
        `contract.CAPTURE_BYTES` and the beginning of a traceback, at most.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    tail = Tail()
    try:
        size = os.fstat(fd).st_size
        tail.add(os.pread(fd, _FILE_BYTES, max(0, size - _FILE_BYTES)))
    except OSError:
        return b""
    finally:
        os.close(fd)
    return tail.read()
