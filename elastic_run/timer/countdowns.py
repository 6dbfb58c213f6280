"""The timers that a server counts down, and which process they have ended.

A request says when it expires on the wall clock, which may be set while it runs. So the time that is left is taken when
the request comes, and the monotonic clock decides from then on. A process that has died is told from one that was
given its pid later by the time of its start.
"""

from __future__ import annotations

import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import psutil

    from elastic_run.timer.timer_file import FileTimerRequest

#: Two clocks are read one after the other; a timer that expires at this very moment has expired.
_TOLERANCE = 0.001
#: Seconds from which on a span is told in whole seconds, and in tenths.
_LONG = 10.0
_SHORT = 0.1
_MOST_NOTES = 1024

#: Why timers have ended processes, by pid. A server and the agent that watches the same workers know nothing of each
#: other, so what they share is kept here, for the process.
_ended: dict[int, str] = {}


def record_expiry(pid: int, text: str) -> None:
    """Record why a process is about to be ended: `scope 'train_step' expired after 60 s`; the last ones are kept."""
    _ended.pop(pid, None)
    while len(_ended) >= _MOST_NOTES:
        del _ended[next(iter(_ended))]
    _ended[pid] = text


def pop_expiry(pid: int) -> str:
    """Return why a process that has ended was ended, once; "" if no timer did it."""
    return _ended.pop(pid, "")


@dataclass(slots=True)
class Countdown:
    """One timer that runs."""

    request: FileTimerRequest
    #: Monotonic seconds at which it expires, and the seconds that it was to run when the request came.
    deadline: float
    span: float
    #: The process that asked; None if it had ended before its request was read.
    process: psutil.Process | None

    def __str__(self) -> str:
        # The request takes a moment to come, so there is no more to say than this.
        digits = 0 if self.span >= _LONG else 1 if self.span >= _SHORT else 2
        return f"scope {self.request.scope_id!r} expired after {round(max(0.0, self.span), digits):g} s"

    @property
    def is_orphan(self) -> bool:
        """Whether the process that asked has ended, and another one may have its pid."""
        import psutil

        try:
            process = self.process
            return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return True


class Countdowns:
    """All timers of a server, one for each worker and scope."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._running: dict[tuple[int, str], Countdown] = {}

    def register(self, requests: Iterable[FileTimerRequest]) -> None:
        """Start, renew or end timers, in the order in which the requests came."""
        for request in requests:
            key = (request.worker_pid, request.scope_id)
            if request.expiration_time < 0:
                self._running.pop(key, None)
                continue
            span = request.expiration_time - self._wall_clock()
            self._running[key] = Countdown(request, self._clock() + span, span, _find_process(request.worker_pid))

    def clear(self, pids: Collection[int] | None = None) -> None:
        """Forget the timers of some workers, or of all."""
        for key in [key for key in self._running if pids is None or key[0] in pids]:
            del self._running[key]

    def expired(self, deadline: float | None = None) -> dict[int, list[Countdown]]:
        """Return the timers that have expired by now, or by seconds since the epoch, by pid; the earliest first."""
        moment = self._clock() + _TOLERANCE
        if deadline is not None:
            moment += deadline - self._wall_clock()
        found: dict[int, list[Countdown]] = {}
        for countdown in sorted(self._running.values(), key=lambda countdown: countdown.deadline):
            if countdown.deadline <= moment:
                found.setdefault(countdown.request.worker_pid, []).append(countdown)
        return found

    def pop_expired(self) -> dict[int, list[Countdown]]:
        """Return the timers that have expired by now, the earliest first, and forget them; a worker's others go on."""
        found = self.expired()
        for countdowns in found.values():
            for countdown in countdowns:
                del self._running[countdown.request.worker_pid, countdown.request.scope_id]
        return found

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next timer expires, no more than a system call can express; None if none runs."""
        deadline = min((countdown.deadline for countdown in self._running.values()), default=None)
        return None if deadline is None else min(LONGEST_WAIT, max(0.0, deadline - self._clock()))


def _find_process(pid: int) -> psutil.Process | None:
    import psutil

    try:
        return psutil.Process(pid)
    except (psutil.Error, OSError, ValueError):
        return None
