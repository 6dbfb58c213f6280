"""A file that output is appended to, on a disk that may be full.

Rules
- A write that fails never raises and never stops the job: the loss is told once, and what can't be written is counted.
- Later data is tried again. When it can be written, a line in the file says how much is missing in front of it.
- Regular files only, and devices that don't block. A disk that is slow does hold the loop up: the kernel has no way of
  writing a file without waiting when its cache is full of dirty pages, short of a thread.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class LogFile:
    """An open file that takes all it can."""

    __slots__ = ("_on_loss", "fd", "lost")

    def __init__(self, fd: int, on_loss: Callable[[OSError], None]) -> None:
        self.fd = fd
        self.lost = 0
        self._on_loss: Callable[[OSError], None] | None = on_loss

    def write(self, data: bytes | memoryview) -> None:
        """Append data, or count it as lost."""
        done = 0
        try:
            if self.lost:
                self._tell_gap()
            done = os.write(self.fd, data)
            while done < len(data):
                done += os.write(self.fd, memoryview(data)[done:])
        except OSError as error:
            self.lost += len(data) - done
            if self._on_loss is not None:
                on_loss, self._on_loss = self._on_loss, None
                on_loss(error)

    def _tell_gap(self) -> None:
        os.write(self.fd, b"\nelastic-run: %d bytes are missing here, they could not be written\n" % self.lost)
        self.lost = 0

    def close(self) -> None:
        """Close the descriptor; harmless when it is closed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
