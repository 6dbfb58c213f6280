"""The named pipe through which workers tell a server of their timers: the requests, and the server's end.

Rules
- The pipe is opened for reading and writing: so it never comes to an end when the last client closes it, and to wait
  for a request is to wait for the descriptor.
- Clients write one line of JSON at a time, shorter than PIPE_BUF: whole lines arrive. What else arrives is counted,
  told once, and dropped.
- A pipe that another server reads is not taken from it, unless both begin at the same moment.

Source of `FileTimerRequest` and of the JSON: torch 2.13, torch.distributed.elastic.timer.file_based_local_timer. The
clients are torch's.
"""

from __future__ import annotations

import json
import math
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: The only version of requests that there is.
_VERSION = 1
_MOST_SIGNAL = 64
_MOST_PID = 1 << 31

_CHUNK = 1 << 16
_MOST_CHUNKS = 16
#: Bytes without an end of line that are kept; no request is as long.
_MOST = 1 << 16
_SHOWN = 80


class FileTimerRequest:
    """A request that goes through a named pipe: to count down to a moment for a scope of code, or to stop counting.

    Args:
        worker_pid: The process that asks.
        scope_id: Name of the scope.
        expiration_time: When it expires, seconds since the epoch; negative to stop counting.
        signal: What the process gets when it expires; nothing if that isn't above 0.
    """

    __slots__ = ("expiration_time", "scope_id", "signal", "version", "worker_id")

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        self.worker_id = worker_pid
        self.scope_id = scope_id
        self.expiration_time = expiration_time
        self.version = _VERSION
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process that asks."""
        return self.worker_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTimerRequest) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment] # as torch's: its fields may be changed

    def to_json(self) -> str:
        """Return the request as one line of JSON, without the end of the line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


def read_request(line: bytes) -> FileTimerRequest:
    """Read a request from the pipe; ValueError says why it is none.

    A beginning that is no JSON, such as half a line of another writer, is passed over.
    """
    # A quote inside a JSON text has a backslash before it, so this can only be where the request begins.
    start = line.rfind(b'{"')
    try:
        fields = json.loads(line[max(0, start) :])
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        message = "not JSON"
        raise ValueError(message)  # noqa: TRY004 - all that is wrong with a line is one kind of error
    if fields.get("version", _VERSION) != _VERSION:
        message = f"of version {fields['version']!r}, and only {_VERSION} is known"
        raise ValueError(message)
    for name, is_good in _CHECKS.items():
        if not is_good(fields.get(name)):
            message = f"its {name} is {fields.get(name, 'missing')!r}"
            raise ValueError(message)
    return FileTimerRequest(fields["pid"], fields["scope_id"], fields["expiration_time"], fields["signal"])


def _is_integer(value: object, least: float, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_moment(value: object) -> bool:
    """Whether a value is a time that can be compared with others."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(float(value))
    except OverflowError:
        return False


_CHECKS: dict[str, Callable[[object], bool]] = {
    "pid": lambda value: _is_integer(value, 1, _MOST_PID - 1),
    "scope_id": lambda value: isinstance(value, str),
    "expiration_time": _is_moment,
    "signal": lambda value: _is_integer(value, -math.inf, _MOST_SIGNAL),
}


class TimerFile:
    """A named pipe that this process reads; an empty file or a pipe that nobody reads is replaced.

    `say` is told, once, what is wrong with a line that is no request.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say
        self._has_said = False
        self._rest = b""
        try:
            self.fd = _make_pipe(self.path)
        except OSError as error:
            reason = f"the timers' pipe can't be made: {error.strerror}"
            raise type(error)(error.errno, reason, self.path) from error
        status = os.fstat(self.fd)
        self._identity = (status.st_dev, status.st_ino)

    def read(self) -> list[FileTimerRequest]:
        """Return the requests that are there, of very many a part; never waits."""
        chunks = [self._rest]
        # No more than the pipe can hold at a time: a client that never stops to write must not keep us here.
        for _ in range(_MOST_CHUNKS):
            try:
                chunks.append(os.read(self.fd, _CHUNK))
            except BlockingIOError:
                break
        *lines, self._rest = b"".join(chunks).split(b"\n")
        if len(self._rest) > _MOST:
            self._refuse(self._rest, "too long")
            self._rest = b""
        requests = []
        for line in filter(bytes.strip, lines):
            try:
                requests.append(read_request(line))
            except ValueError as error:
                self._refuse(line, str(error))
        return requests

    def _refuse(self, line: bytes, reason: str) -> None:
        if not self._has_said:
            self._has_said = True
            shown = ascii(line[:_SHOWN].decode(errors="replace"))
            self.say(f"{self.path}: a line there is not a timer request, and is ignored ({reason}): {shown}")

    def close(self) -> None:
        """Close and remove the pipe; harmless when that was done."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
        except OSError:
            pass  # another process has removed it, or has put a file there


def _make_pipe(path: str) -> int:
    """Make a named pipe that only this user can open; return a descriptor that reads it."""
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        _remove_stale(path)
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def _remove_stale(path: str) -> None:
    """Remove a pipe that nobody reads, or an empty file; raise FileExistsError if something else stands there."""
    status = os.lstat(path)
    if not stat.S_ISFIFO(status.st_mode) and not (stat.S_ISREG(status.st_mode) and not status.st_size):
        reason = "something else stands there"
        raise FileExistsError(17, reason)
    if has_reader(path):
        reason = "another timer server reads there"
        raise FileExistsError(17, reason)
    os.unlink(path)


def has_reader(path: str) -> bool:
    """Whether a process reads a named pipe."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
