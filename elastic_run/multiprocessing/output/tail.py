"""The last bytes of a stream, for the report, and its last exception, even if much output has followed it.

An exception may have a message of megabytes (all keys that a checkpoint lacks, a tensor), which stands behind its type
and its frames. And when a program dies of one, its other threads, its exit handlers and the processes that it started
write on. So a traceback that leaves the window is kept (`last_exception`) until there is another one.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.output.last_exception import LastException, find_last

#: Bytes of a log file that are looked at in any case, and that are read at once.
_FILE_BYTES = 1 << 20
#: Bytes of a log file, from its end, in which its last exception is looked for: 0.1 s.
_SEARCHED_BYTES = 1 << 28
#: Bytes before an exception that are read, too: there stands what it followed from.
_BEFORE = 1 << 16
#: More than the first line of a traceback has.
_FIRST_LINE_BYTES = 64


class Tail:
    """Keeps the end of what was added, `contract.CAPTURE_BYTES` of it, and the last exception."""

    __slots__ = ("_exception", "_pieces")

    def __init__(self) -> None:
        self._pieces = bytearray()
        self._exception = LastException()

    def add(self, data: bytes) -> None:
        """Append data, and forget what is too old."""
        self._pieces += data
        if len(self._pieces) > 2 * contract.CAPTURE_BYTES:  # not at every byte: moving the rest down costs
            self._forget()

    def read(self) -> bytes:
        """Return the end of the stream, and before it its last exception."""
        self._forget()
        return self._exception.read() + self._pieces

    def _forget(self) -> None:
        """Drop output that is too old, but keep an exception."""
        old = len(self._pieces) - contract.CAPTURE_BYTES
        if old > 0:
            self._exception.take(self._pieces, old)
            del self._pieces[:old]


def read_tail(path: str, *, is_thorough: bool = True) -> bytes:
    """Return the end of a file as `Tail` does, or nothing when it can't be read.

    Args:
        path: A log file that a worker wrote itself.
        is_thorough: Whether an exception is looked for in more than the last MiB, which may take 0.1 s.

    Returns:
        `contract.CAPTURE_BYTES` and the last exception, at most.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return _read_end(fd, _SEARCHED_BYTES if is_thorough else _FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _read_end(fd: int, searched: int) -> bytes:
    size = os.fstat(fd).st_size
    start = max(0, size - _FILE_BYTES)
    found = _find_traceback(fd, size, max(0, size - searched)) if start else -1
    if 0 <= found < start:
        start = max(0, found - _BEFORE)
    tail = Tail()
    while start < size and (data := os.pread(fd, min(_FILE_BYTES, size - start), start)):
        tail.add(data)
        start += len(data)
    return tail.read()


def _find_traceback(fd: int, end: int, least: int) -> int:
    """Return where the last traceback in a part of a file begins, or -1; backwards, a MiB at a time."""
    while end > least:
        start = max(least, end - _FILE_BYTES)
        # A first line may go on in the part behind, which was searched already.
        text = os.pread(fd, end - start + _FIRST_LINE_BYTES, start)
        found = find_last(text, min(end - start, len(text)))
        if found >= 0:
            return start + found
        end = start
    return -1
