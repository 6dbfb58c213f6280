"""What a launcher under the clock writes to, a pipe, a terminal or a file, and a thread that reads it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

#: Bytes per read: what a pipe holds.
_READ_SIZE = 1 << 16
#: Reads after which the launcher's memory is looked at again.
_READS = 64
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


class Console:
    """A launcher's stdout and stderr.

    Args:
        sink: `pipe`, `terminal` or `file`.
        path: The file's, should it be one.
        stall: Seconds that the reader does nothing after its first read.

    Attributes:
        writer: The descriptor for the launcher.
        peak_megabytes: The largest resident memory that the launcher was seen to have had; of a file it isn't known.
    """

    def __init__(self, sink: str, path: Path, *, stall: float = 0.0) -> None:
        self._path = path
        self._stall = stall
        self._received: list[bytes] = []
        self._last_byte_at = 0
        self._thread: threading.Thread | None = None
        self.peak_megabytes = 0.0
        if sink == "file":
            self._reader, self.writer = -1, os.open(path, os.O_WRONLY | os.O_CREAT)
        else:
            self._reader, self.writer = os.pipe() if sink == "pipe" else os.openpty()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_writer()
        if self._thread is not None:
            self._thread.join()
        if self._reader >= 0:
            os.close(self._reader)

    def read_from(self, pid: int) -> None:
        """Begin to read what a launcher and its workers write; they have inherited the writing end.

        Args:
            pid: The launcher.
        """
        self._close_writer()
        if self._reader >= 0:
            self._thread = threading.Thread(target=self._read, args=[Path(f"/proc/{pid}/status")])
            self._thread.start()

    def wait_last_byte(self) -> int:
        """Wait until all writers are gone, and return the monotonic time in ns at which the last byte was there."""
        if self._thread is None:
            return time.monotonic_ns() - (time.time_ns() - self._path.stat().st_mtime_ns)
        self._thread.join()
        return self._last_byte_at

    def received(self) -> bytes:
        """Return all that came, after `wait_last_byte`."""
        return b"".join(self._received) if self._reader >= 0 else self._path.read_bytes()

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _read(self, status: Path) -> None:
        with contextlib.suppress(OSError):  # a terminal ends with EIO
            while chunk := os.read(self._reader, _READ_SIZE):
                self._last_byte_at = time.monotonic_ns()
                self._received.append(chunk)
                if self._stall and len(self._received) % _READS == 1:
                    if len(self._received) == 1:
                        time.sleep(self._stall)
                    self._look_at_memory(status)

    def _look_at_memory(self, status: Path) -> None:
        with contextlib.suppress(OSError):  # it has ended
            found = _PEAK.search(status.read_text(encoding="utf-8", errors="replace"))
            self.peak_megabytes = int(found[1]) * 1024 / 1e6 if found else self.peak_megabytes
