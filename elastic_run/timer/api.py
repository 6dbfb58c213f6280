"""Countdown timers: the interface of servers, and `expires`, which a training script uses.

Source of the names, signatures and hooks: torch 2.13, torch.distributed.elastic.timer.api. Different on purpose: a
scope without a name is called after the line that opened it (torch: a line of contextlib, the same for all), and where
nothing is configured, TORCHELASTIC_TIMER_FILE is used if elastic-run has set it.
"""

from __future__ import annotations

import abc
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager

from elastic_run.contract import ENV_TIMER_FILE
from elastic_run.timer.requests import TimerClient, TimerRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import _GeneratorContextManager
    from typing import Any


__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

logger = logging.getLogger(__name__)

#: Seconds that a server waits after an error before it goes on, and at the end for its thread.
_PAUSE = 1.0


class RequestQueue(abc.ABC):
    """Where a server finds the requests of its clients."""

    @abc.abstractmethod
    def size(self) -> int:
        """Return how many requests are there; only `get` makes them fewer."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take requests.

        Args:
            size: How many at most.
            timeout: Seconds to wait at most until there are so many.

        Returns:
            Those that came.
        """


class TimerServer(abc.ABC):
    """Counts down timers in a thread of its own, and ends workers whose timers expire.

    Args:
        request_queue: Where requests come from.
        max_interval: Seconds to wait for a request at most.
        daemon: Whether the thread lets the process end.
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._stopped = threading.Event()

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Start timers, and end those whose expiration time is negative.

        Args:
            timer_requests: In the order in which they came.
        """

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of some workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """Return the timers that expire until a moment, by worker.

        Args:
            deadline: Seconds since the epoch.
        """

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker; return whether that is done, else it is tried again."""

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("a timer expired, and _reap_worker raised; worker %s counts as ended", worker_id)
            return True

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                logger.exception("error in a timer server's loop; it goes on")
                self._stopped.wait(min(self._max_interval, _PAUSE))

    def _run_watchdog(self) -> None:
        count = max(1, self._request_queue.size())
        wait = self._seconds_to_wait()
        if threading.current_thread() is not self._watchdog_thread:
            wait = min(wait, self._max_interval)  # a program that takes this step by itself is to get it back
        self.register_timers(self._request_queue.get(count, wait))
        reaped = set()
        for worker_id, timers in self.get_expired_timers(time.time()).items():
            logger.info("worker %s is ended: its timers %s expired", worker_id, self._get_scopes(timers))
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                logger.error("worker %s could not be ended; that is tried again", worker_id)
        self.clear_timers(reaped)

    def _seconds_to_wait(self) -> float:
        """Return how long to wait for a request; a server that knows its next deadline waits as long."""
        return self._max_interval

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [request.scope_id for request in timer_requests]

    def start(self) -> None:
        """Start to count down; returns at once."""
        logger.info("%s starts, max_interval=%s", type(self).__name__, self._max_interval)
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="timers", daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        """End; timers that run are forgotten."""
        self._stop_signaled = True
        self._stopped.set()
        if self._watchdog_thread is not None:
            self._wake()
            self._watchdog_thread.join(max(self._max_interval, _PAUSE))
            self._watchdog_thread = None
        logger.info("%s has stopped", type(self).__name__)

    def _wake(self) -> None:  # noqa: B027 - most queues can't do it
        """Make a waiting `get` return, where that can be done."""


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Choose the client that `expires` uses in this process.

    Args:
        timer_client: The client.
    """
    global _timer_client  # noqa: PLW0603 - torch has one per process
    _timer_client = timer_client
    logger.info("timer client: %s", type(timer_client).__name__)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """Let this worker be ended unless a block of code is left in time; usable as a decorator, too.

    The server decides: the worker may live a little longer.

    Args:
        after: Seconds that the block may take.
        scope: Its name, for the report; None for ``file#line`` of the caller.
        client: Who tells the server; None for the one given to `configure`, or for the file that elastic-run serves.

    Returns:
        The context manager; to enter it raises RuntimeError where there is no client.
    """
    if scope is None:
        caller = sys._getframe(1)  # noqa: SLF001 - inspect.stack reads the source of every frame
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _count_down(after, scope, client)


@contextmanager
def _count_down(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _timer_client or _client_of_the_agent()
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)


def _client_of_the_agent() -> TimerClient:
    path = os.environ.get(ENV_TIMER_FILE)
    if not path:
        message = (
            "no timer client: call timer.configure(client) before timer.expires, "
            "or start the job with TORCHELASTIC_ENABLE_FILE_TIMER=1"
        )
        raise RuntimeError(message)
    from elastic_run.timer.file_based_local_timer import FileTimerClient

    client = FileTimerClient(path)
    configure(client)
    return client
