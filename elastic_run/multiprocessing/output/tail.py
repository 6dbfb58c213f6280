"""The last bytes of a stream, for the report."""

from __future__ import annotations

import os

from elastic_run import contract


class Tail:
    """Keeps the end of what was added, `contract.CAPTURE_BYTES` of it."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces = bytearray()

    def add(self, data: bytes) -> None:
        """Append data, and forget what is too old.

        Args:
            data: The next bytes of the stream.
        """
        limit = contract.CAPTURE_BYTES
        if len(data) >= limit:
            self._pieces = bytearray(memoryview(data)[-limit:])
            return
        self._pieces += data
        if len(self._pieces) > 2 * limit:  # not at every byte: moving the rest down costs
            del self._pieces[:-limit]

    def read(self) -> bytes:
        """Return the end of the stream."""
        return bytes(self._pieces[-contract.CAPTURE_BYTES :])


def read_tail(path: str) -> bytes:
    """Return the end of a file, or nothing when it can't be read.

    Args:
        path: A log file that a worker wrote itself.

    Returns:
        At most `contract.CAPTURE_BYTES`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, contract.CAPTURE_BYTES, max(0, size - contract.CAPTURE_BYTES))
    except OSError:
        return b""
    finally:
        os.close(fd)
