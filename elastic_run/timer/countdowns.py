"""The timers that a server counts down.

A request says when it expires on the wall clock, which may be set while it runs. So the time that is left is taken when
the request comes, and the monotonic clock decides from then on. A process that has died is told from one that was
given its pid later by the time of its start.
"""

from __future__ import annotations

import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.records import dataclass
from elastic_run.timer.requests import is_moment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    import psutil

    from elastic_run.timer.requests import TimerRequest

#: Two clocks are read one after the other; a timer that expires at this very moment has expired.
_TOLERANCE = 0.001
#: Seconds from which on a span is told in whole seconds, and in tenths.
_LONG = 10.0
_SHORT = 0.1


@dataclass(slots=True)
class Countdown:
    """One timer that runs.

    Args:
        request: What was asked.
        deadline: Monotonic seconds at which it expires.
        span: Seconds that it was to run when the request came.
        process: The process that asked; None if it had ended before its request was read.
    """

    request: TimerRequest
    deadline: float
    span: float
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
    """All timers of a server, one for each worker and scope.

    Args:
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._running: dict[tuple[Any, str], Countdown] = {}

    def __len__(self) -> int:
        return len(self._running)

    def register(self, requests: Iterable[TimerRequest]) -> None:
        """Start, renew or end timers.

        Args:
            requests: In the order in which they came.

        Raises:
            ValueError: One has no time that can be compared; those before it count.
        """
        for request in requests:
            if not is_moment(request.expiration_time):
                message = f"timer of scope {request.scope_id!r}: its expiration time is {request.expiration_time!r}"
                raise ValueError(message)
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._running.pop(key, None)
                continue
            span = request.expiration_time - self._wall_clock()
            self._running[key] = Countdown(request, self._clock() + span, span, _find_process(request.worker_id))

    def clear(self, worker_ids: Collection[Any]) -> None:
        """Forget the timers of some workers."""
        for key in [key for key in self._running if key[0] in worker_ids]:
            del self._running[key]

    def clear_all(self) -> None:
        """Forget all timers."""
        self._running.clear()

    def expired(self, deadline: float | None = None) -> dict[Any, list[Countdown]]:
        """Return the timers that have expired, the earliest first; they are not forgotten.

        Args:
            deadline: Seconds since the epoch by which they do; None for now.

        Returns:
            Timers by worker.
        """
        moment = self._clock() + _TOLERANCE
        if deadline is not None:
            moment += deadline - self._wall_clock()
        found: dict[Any, list[Countdown]] = {}
        for countdown in sorted(self._running.values(), key=lambda countdown: countdown.deadline):
            if countdown.deadline <= moment:
                found.setdefault(countdown.request.worker_id, []).append(countdown)
        return found

    def take_expired(self) -> dict[Any, list[Countdown]]:
        """Return the timers that have expired by now, the earliest first, and forget them; a worker's others go on."""
        found = self.expired()
        for countdowns in found.values():
            for countdown in countdowns:
                del self._running[countdown.request.worker_id, countdown.request.scope_id]
        return found

    @property
    def next_deadline(self) -> float | None:
        """Monotonic seconds at which the next timer expires; None if none runs."""
        return min((countdown.deadline for countdown in self._running.values()), default=None)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next timer expires, no more than a system call can express; None if none runs."""
        deadline = self.next_deadline
        return None if deadline is None else min(LONGEST_WAIT, max(0.0, deadline - self._clock()))


def _find_process(worker_id: Any) -> psutil.Process | None:
    import psutil

    try:
        return psutil.Process(worker_id) if isinstance(worker_id, int) else None
    except (psutil.Error, OSError, ValueError):
        return None
