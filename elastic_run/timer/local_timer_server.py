"""Torch's server of timers that come through a `multiprocessing.Queue`, with three differences.

It waits until a request comes or the next timer expires, whichever is first (torch: for `max_interval`, a minute, so
that a timer may expire a minute late). `stop` does not wait for the next request. And an exception of `elastic_launch`
names the scope that expired.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from torch.distributed.elastic.timer import local_timer
from torch.distributed.elastic.timer.api import TimerRequest

from elastic_run.timer.countdowns import record_expiry

__all__ = ["LocalTimerServer"]


class LocalTimerServer(local_timer.LocalTimerServer):
    """Counts down for `LocalTimerClient`s in a thread, and kills the processes whose timers expire.

    Args:
        mp_queue: The queue that the clients write.
        max_interval: Seconds that the server waits at most for a request.
        daemon: Whether its thread lets the process end.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(mp_queue, max_interval, daemon)
        self._mp_queue = mp_queue
        self._request_queue = _Requests(mp_queue, self)

    def stop(self) -> None:
        """End; timers that run are forgotten."""
        self._stop_signaled = True
        self._mp_queue.put(TimerRequest(os.getpid(), "", -1))  # asks for nothing, and ends the wait
        super().stop()

    def _seconds_left(self) -> float:
        deadline = min((request.expiration_time for request in self._timers.values()), default=math.inf)
        return max(0.0, deadline - time.time())

    def _reap_worker(self, worker_id: int) -> bool:
        expired = self.get_expired_timers(time.time()).get(worker_id, ())
        if expired:
            record_expiry(worker_id, f"scope {expired[0].scope_id!r} expired")
        return super()._reap_worker(worker_id)


class _Requests(local_timer.MultiprocessingRequestQueue):
    def __init__(self, mp_queue: Any, server: LocalTimerServer) -> None:
        super().__init__(mp_queue)
        self._server = server

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        return super().get(size, min(timeout, self._server._seconds_left()))  # noqa: SLF001 - a part of it
