"""Timers through a `multiprocessing.Queue`, for a program that starts its workers by itself and shares the queue.

The server waits until a request comes or the next timer expires, whichever is first, however long that is. The
client and the server may each be torch's. Source of the names: torch 2.13, torch.distributed.elastic.timer.local_timer.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.timer import expiries
from elastic_run.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
from elastic_run.timer.countdowns import Countdowns
from elastic_run.timer.signal_process import signal_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    import multiprocessing as mp
    from typing import Any

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """A worker's side of a `LocalTimerServer` on the same machine; the worker is known by its pid.

    Args:
        mp_queue: The queue that the server reads.
    """

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """End a timer of this process."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The requests in a `multiprocessing.Queue`.

    Args:
        mp_queue: The queue.
    """

    def __init__(self, mp_queue: mp.Queue[Any]) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """Return how many requests are there."""
        return self._mp_queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to `size` requests, waiting for them up to `timeout` seconds, which may be infinite."""
        found: list[TimerRequest] = []
        end = time.monotonic() + timeout
        while len(found) < size:
            try:
                found.append(self._mp_queue.get(timeout=min(LONGEST_WAIT, max(0.0, end - time.monotonic()))))
            except queue.Empty:
                if time.monotonic() >= end:
                    break
        return found

    def wake(self) -> None:
        """Make a waiting `get` return, by a request that asks for nothing."""
        try:
            self._mp_queue.put_nowait(TimerRequest(os.getpid(), "", -1))
        except (queue.Full, ValueError, OSError):
            pass  # full: no reader waits; closed: no reader can


class LocalTimerServer(TimerServer):
    """Counts down for `LocalTimerClient`s and kills the processes whose timers expire, and no other.

    Args:
        mp_queue: The queue that the clients write.
        max_interval: Kept for torch's signature; the server waits for the next deadline.
        daemon: Whether its thread lets the process end.
    """

    def __init__(self, mp_queue: mp.Queue[Any], max_interval: float = 60, daemon: bool = True) -> None:
        self._requests = MultiprocessingRequestQueue(mp_queue)
        super().__init__(self._requests, max_interval, daemon)
        self._timers = Countdowns()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Start and end timers; what is no request is logged and dropped."""
        for request in timer_requests:
            try:
                self._timers.register((request,))
            except (AttributeError, TypeError, ValueError) as error:
                logger.warning(
                    "a message in the timers' queue is not a request, and is ignored: %r (%s)", request, error
                )

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget the timers of some processes."""
        self._timers.clear(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire until a moment, by pid."""
        expired = self._timers.expired(deadline)
        return {pid: [countdown.request for countdown in countdowns] for pid, countdowns in expired.items()}

    def _seconds_to_wait(self) -> float:
        left = self._timers.seconds_left
        return math.inf if left is None else left

    def _wake(self) -> None:
        self._requests.wake()

    def _reap_worker(self, worker_id: int) -> bool:
        for countdown in self._timers.expired().get(worker_id, ())[:1]:
            if countdown.is_orphan:
                return True
            expiries.note(worker_id, str(countdown))
        return signal_process(worker_id, signal.SIGKILL)
