"""The agent's side of the workers' timers: the pipe of their requests, and the timers that count down.

- The pipe is opened for reading and writing: so it never comes to an end when the last client closes it, and to wait
  for a request is to wait for the descriptor. A pipe that another server reads is not taken from it.
- Clients are torch's. They write one line of JSON at a time, shorter than PIPE_BUF: whole lines arrive. Any other line
  is dropped, and the first one is reported.
- A request says when it expires on the wall clock, which may be set while the timer runs. So the time that is left is
  taken when the request comes, and the monotonic clock decides from then on.

Source of the JSON: torch 2.13, torch.distributed.elastic.timer.file_based_local_timer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time

from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.fork_exec import start_time
from elastic_run.records import dataclass

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
#: Seconds: two clocks are read one after the other, and a timer that expires at this very moment has expired.
_TOLERANCE = 0.001
#: Seconds from which on a span is told in whole seconds, and in tenths.
_LONG = 10.0
_SHORT = 0.1

#: Why timers have ended processes, by pid. A server and the agent that watches the same workers know nothing of each
#: other, so what they share is kept here, for the process.
_ended: dict[int, str] = {}


def record_expiry(pid: int, text: str) -> None:
    """Record why a process is about to be ended: `scope 'train_step' expired after 60 s`."""
    _ended[pid] = text


def pop_expiry(pid: int) -> str:
    """Return why a process that has ended was ended, once; "" if no timer did it."""
    return _ended.pop(pid, "")


@dataclass(slots=True)
class ScopeTimer:
    """A worker's timer for a scope of code."""

    worker_pid: int
    scope_id: str
    #: Seconds since the epoch; negative to stop counting.
    expiration_time: float
    #: The signal that the process gets when the timer expires; 0 or less for none.
    signal: int = 0
    #: Monotonic seconds at which it expires, and the seconds that it was to run when the request came.
    deadline: float = 0.0
    span: float = 0.0
    #: Start time of the process that asked, in clock ticks: a process that was given its pid later has another one.
    born: int = 0

    def __str__(self) -> str:
        # The request takes a moment to come, so there is no more to say than this.
        digits = 0 if self.span >= _LONG else 1 if self.span >= _SHORT else 2
        return f"scope {self.scope_id!r} expired after {round(max(0.0, self.span), digits):g} s"

    @property
    def is_orphan(self) -> bool:
        """Whether the process that asked has ended, and another one may have its pid."""
        now = process_table.read_stat(self.worker_pid)
        return now is None or now.state in process_table.GONE_STATES or now.started_at != self.born


def read_request(line: bytes) -> ScopeTimer | None:
    """Read a request from the pipe; None for any other line.

    A beginning that is no JSON, such as half a line of another writer, is passed over.
    """
    # A quote inside a JSON text has a backslash before it, so this can only be where the request begins.
    start = max(0, line.rfind(b'{"'))
    try:
        match json.loads(line[start:]):
            case {
                "pid": int(pid),
                "scope_id": str(scope),
                "expiration_time": int() | float() as end,
                "signal": int(number),
            } as fields:
                is_sound = 0 < pid < _MOST_PID and number <= _MOST_SIGNAL and not math.isnan(float(end))
                if is_sound and fields.get("version", _VERSION) == _VERSION:
                    return ScopeTimer(pid, scope, float(end), number)
    except (ValueError, OverflowError, RecursionError):
        pass
    return None


class TimerFile:
    """A named pipe that this process reads, and the timers that run, one for each worker and scope.

    A pipe that nobody reads is replaced. `say` gets the line about the first line that is no request.
    """

    def __init__(
        self,
        path: str,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.say = say
        self._clock = clock
        self._wall_clock = wall_clock
        self._has_said = False
        self._rest = b""
        self._running: dict[tuple[int, str], ScopeTimer] = {}
        try:
            self.fd = _make_pipe(self.path)
        except OSError as error:
            reason = f"the timers' pipe can't be made: {error.strerror}"
            raise type(error)(error.errno, reason, self.path) from error
        status = os.fstat(self.fd)
        self._identity = (status.st_dev, status.st_ino)

    def read(self) -> None:
        """Start, renew or end timers by the requests that are there, of very many a part; never waits."""
        chunks = [self._rest]
        # No more than the pipe can hold at a time: a client that never stops to write must not keep us here.
        for _ in range(_MOST_CHUNKS):
            try:
                chunks.append(os.read(self.fd, _CHUNK))
            except BlockingIOError:
                break
        *lines, self._rest = b"".join(chunks).split(b"\n")
        if len(self._rest) > _MOST:
            lines.append(self._rest)
            self._rest = b""
        for line in filter(bytes.strip, lines):
            request = read_request(line)
            if request is not None:
                self.register(request)
            elif not self._has_said:
                self._has_said = True
                shown = ascii(line[:_SHOWN].decode(errors="replace"))
                self.say(f"{self.path}: a line there is not a timer request, and is ignored: {shown}")

    def register(self, timer: ScopeTimer) -> None:
        """Start or renew a timer, or end it if its expiration time is negative."""
        key = (timer.worker_pid, timer.scope_id)
        if timer.expiration_time < 0:
            self._running.pop(key, None)
            return
        timer.span = timer.expiration_time - self._wall_clock()
        timer.deadline = self._clock() + timer.span
        timer.born = start_time(timer.worker_pid)
        self._running[key] = timer

    def clear(self) -> None:
        """Forget all timers."""
        self._running.clear()

    def pop_expired(self) -> dict[int, list[ScopeTimer]]:
        """Return the timers that have expired by now by pid, the earliest first, and forget them."""
        moment = self._clock() + _TOLERANCE
        found: dict[int, list[ScopeTimer]] = {}
        for timer in sorted(self._running.values(), key=lambda timer: timer.deadline):
            if timer.deadline <= moment:
                found.setdefault(timer.worker_pid, []).append(timer)
                del self._running[timer.worker_pid, timer.scope_id]
        return found

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next timer expires; None if none runs."""
        deadline = min((timer.deadline for timer in self._running.values()), default=None)
        return None if deadline is None else max(0.0, deadline - self._clock())

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
    """Make a named pipe that only this user can open, also in place of one that nobody reads; open it for reading."""
    # It has its reader before it has its name: another agent that starts now with the same path finds it in use.
    own = f"{path}.{os.urandom(4).hex()}"
    os.mkfifo(own, 0o600)
    fd = os.open(own, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.link(own, path)
    except OSError as error:
        if not isinstance(error, FileExistsError) or not stat.S_ISFIFO(os.lstat(path).st_mode) or has_reader(path):
            os.close(fd)
            raise
        os.rename(own, path)
    else:
        return fd
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
    return fd


def has_reader(path: str) -> bool:
    """Whether a process reads a named pipe."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
