"""A server of timers through a named pipe, in a thread, for programs and agents without a loop of ours.

Its names and signatures are torch's (torch 2.13, torch.distributed.elastic.timer.file_based_local_timer). Different on
purpose: an expiry ends only the worker (torch's server ends its own process, the agent, as well), and the server waits
for requests and deadlines instead of looking for them ten times a second.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from elastic_run import contract
from elastic_run.timer.countdowns import Countdowns, record_expiry
from elastic_run.timer.timer_file import TimerFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.timer.countdowns import Countdown
    from elastic_run.timer.timer_file import FileTimerRequest

logger = logging.getLogger(__name__)


class FileTimerServer:
    """Counts down for `FileTimerClient`s in a thread, and signals the processes whose timers expire, and no other.

    Args:
        file_path: Where to make the named pipe.
        run_id: Id of the job, for the log.
        max_interval: Seconds that `stop` waits for the thread; the server waits for the next deadline.
        daemon: Whether its thread lets the process end.
        log_event: Called with the name of an event and the request that it is about, or None.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or (lambda _name, _request: None)
        self._timers = Countdowns()
        self._file = TimerFile(file_path, logger.warning)
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._busy_since: float | None = None

    def start(self) -> None:
        """Start to count down; returns at once."""
        self._thread = threading.Thread(target=self._serve, name="timers", daemon=self._daemon)
        self._thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """End, and remove the pipe; timers that run are forgotten."""
        self._is_stopping = True
        self._end(self._max_interval)
        self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Take all requests that are there, end those that have expired, then end as `stop` does."""
        self._end(None)

    def _end(self, wait_limit: float | None) -> None:
        thread, self._thread = self._thread, None
        if self._wake_write >= 0:
            os.close(self._wake_write)
            self._wake_write = -1
        if thread is not None:
            thread.join(wait_limit)
        if self._wake_read >= 0 and (thread is None or not thread.is_alive()):
            os.close(self._wake_read)
            self._wake_read = -1
            self._file.close()

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is a process of this user with that pid."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Start timers, and end those whose expiration time is negative, in the order in which they came."""
        self._timers.register(timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget the timers of some processes."""
        self._timers.clear(worker_pids)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire until a moment, in seconds since the epoch, by pid."""
        expired = self._timers.expired(deadline)
        return {pid: [countdown.request for countdown in countdowns] for pid, countdowns in expired.items()}

    def get_last_progress_time(self) -> int:
        """Return when the server was last known to do its work, in whole seconds since the epoch.

        That is now, unless it has been busy with the same requests for a while.
        """
        return int(time.time() if self._busy_since is None else self._busy_since)

    # --- the thread --------------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._file.fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        is_over = False
        while not is_over:
            left = self._timers.seconds_left
            events = poll.poll(None if left is None else min(left, contract.LONGEST_WAIT) * 1000)
            is_over = any(fd == self._wake_read for fd, _ in events)
            if self._is_stopping:
                return
            self._busy_since = time.time()
            try:
                self._timers.register(self._file.read())
                for pid, countdowns in self._timers.pop_expired().items():
                    self._end_process(pid, countdowns)
            except Exception:
                # A callback of the program's; the timers of the others go on.
                logger.exception("error in a timer server's loop; it goes on")
            self._busy_since = None

    def _end_process(self, pid: int, countdowns: list[Countdown]) -> None:
        logger.info("job %s: these timers expired: %s", self._run_id, [str(countdown) for countdown in countdowns])
        for countdown in countdowns:
            self._log_event("timer expired", countdown.request)
        chosen = next((countdown for countdown in countdowns if countdown.request.signal > 0), None)
        if chosen is None or chosen.is_orphan:
            logger.info("process %s is left alone: its timers name no signal, or it has ended", pid)
            return
        record_expiry(pid, str(chosen))
        try:
            os.kill(pid, chosen.request.signal)
        except OSError as error:
            logger.warning("process %s can't be sent signal %s: %s", pid, chosen.request.signal, error.strerror)
        else:
            self._log_event("kill worker process", chosen.request)
