"""The result of a function worker: its return value or its traceback, through an anonymous pipe to the launcher.

Rules
- Each worker sends one result: a byte for the kind, the length, then as many bytes. The length marks the end, not the
  end of the file: a process that the worker left behind may hold the pipe open.
- The worker writes and blocks; the launcher reads whenever data is there, so a result may have any size.
- Only a child that this process started can write to such a pipe, so the launcher may unpickle the result (law 5).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.loop import Loop

#: A pickled return value.
VALUE = b"V"
#: The text of a traceback.
TRACEBACK = b"T"

_LENGTH = 8
_HEADER = 1 + _LENGTH
_READ_SIZE = 1 << 20
_PIPE_SIZE = 1 << 20


def open_result_pipe() -> tuple[int, int]:
    """Open a pipe for one result.

    Returns:
        The launcher's end, non-blocking, and the worker's; both closed on exec.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return reading, writing


def send_result(fd: int, kind: bytes, payload: bytes) -> None:
    """Write a result, and close the pipe.

    Raises:
        BrokenPipeError: The launcher is gone.
    """
    if len(payload) > _PIPE_SIZE:
        _enlarge(fd)
    _write(fd, kind + len(payload).to_bytes(_LENGTH, "little"))
    _write(fd, payload)
    os.close(fd)


def _enlarge(fd: int) -> None:
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    except (AttributeError, OSError):
        pass  # not Linux, or the user's share of pipes is used up: it only takes more turns


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class ResultReader:
    """The launcher's end of a worker's result."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = bytearray()
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        """Read whenever something is there."""
        self._loop = loop
        loop.add_reader(self._fd, self._on_readable)

    def finish(self) -> None:
        """Read the rest of an ended worker's result, and close the pipe; harmless when closed."""
        while self._fd >= 0 and self._read():
            pass
        self.close()

    def close(self) -> None:
        """Close the pipe; harmless when closed."""
        if self._fd < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    @property
    def kind(self) -> bytes:
        """`VALUE` or `TRACEBACK`; empty as long as the result is not whole."""
        return bytes(self._data[:1]) if self._is_whole else b""

    @property
    def payload(self) -> memoryview:
        """The worker's result; empty as long as it is not whole."""
        return memoryview(self._data)[_HEADER:] if self._is_whole else memoryview(b"")

    @property
    def _is_whole(self) -> bool:
        return len(self._data) >= _HEADER and len(self._data) >= _HEADER + self._length

    @property
    def _length(self) -> int:
        return int.from_bytes(self._data[1:_HEADER], "little")

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            chunk = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return False
        self._data += chunk
        if not chunk or self._is_whole:
            self.close()
            return False
        return True
