"""Timers through a named pipe, whose path is TORCHELASTIC_TIMER_FILE where elastic-run serves them.

The client and the server may each be torch's. Source of the names: torch 2.13,
torch.distributed.elastic.timer.file_based_local_timer. Different on purpose: an expiry ends only the worker (torch's
server ends its own process, the agent, as well), and the server waits for requests and deadlines instead of looking
for them.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time

from elastic_run import contract, lazy_names
from elastic_run.timer import expiries
from elastic_run.timer.countdowns import Countdowns
from elastic_run.timer.debug_info_logging import log_debug_info_for_expired_timers
from elastic_run.timer.requests import FileTimerRequest, TimerClient
from elastic_run.timer.signal_process import signal_process
from elastic_run.timer.timer_file import TimerFile, write_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.timer.countdowns import Countdown

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "TimerRequest": "elastic_run.timer.requests",
        "get_logger": "elastic_run.utils.logging",
    },
)

logger = logging.getLogger(__name__)

#: How often, and how many seconds apart, a client looks for a server that may be about to start.
_TRIES = 10
_PAUSE = 0.1
#: Seconds that a client waits while the pipe is full.
_WAIT_LIMIT = 1.0


class FileTimerClient(TimerClient):
    """A worker's side of a `FileTimerServer` on the same machine.

    Args:
        file_path: The named pipe that the server made.
        signal: What this process gets when a timer expires; nothing if that isn't above 0.
    """

    def __init__(self, file_path: str, signal: int = signal.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer of this process.

        Args:
            scope_id: Name of the scope.
            expiration_time: When it expires, seconds since the epoch.

        Raises:
            BrokenPipeError: No server reads the pipe.
            RuntimeError: The name is too long.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """End a timer of this process.

        Args:
            scope_id: Name of the scope.

        Raises:
            BrokenPipeError: No server reads the pipe.
            RuntimeError: The name is too long.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            message = f"the name of a timer's scope is too long: the request has {len(line)} of {select.PIPE_BUF} bytes"
            raise RuntimeError(message)
        # The pipe is opened for each request: torch's server waits for its writers to close it.
        for number in range(1, _TRIES + 1):
            try:
                write_line(self._file_path, line, _WAIT_LIMIT)
            except OSError as error:
                if number == _TRIES:
                    message = f"no timer server reads {self._file_path}: {error.strerror}"
                    raise BrokenPipeError(message) from error
                # Nothing tells when a server appears.
                time.sleep(_PAUSE)
            else:
                return


class FileTimerServer:
    """Counts down for `FileTimerClient`s in a thread, and signals the processes whose timers expire, and no other.

    Args:
        file_path: Where to make the named pipe.
        run_id: Id of the job, for the log.
        max_interval: Seconds that `stop` waits for the thread; the server waits for the next deadline.
        daemon: Whether its thread lets the process end.
        log_event: Called with the name of an event and the request that it is about, or None.

    Raises:
        OSError: The pipe can't be made.
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
        self._log_event: Callable[[str, FileTimerRequest | None], None] = log_event or (lambda _name, _request: None)
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
        """Start timers, and end those whose expiration time is negative.

        Args:
            timer_requests: In the order in which they came.
        """
        self._timers.register(timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget the timers of some processes."""
        self._timers.clear(worker_pids)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire until a moment, by pid.

        Args:
            deadline: Seconds since the epoch.
        """
        return _requests(self._timers.expired(deadline))

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
                self._expire()
            except Exception:
                # A callback of the program's; the timers of the others go on.
                logger.exception("error in a timer server's loop; it goes on")
            self._busy_since = None

    def _expire(self) -> None:
        expired = self._timers.take_expired()
        told = {pid: [request.to_json() for request in requests] for pid, requests in _requests(expired).items()}
        log_debug_info_for_expired_timers(self._run_id, told)
        for pid, countdowns in expired.items():
            for countdown in countdowns:
                self._log_event("timer expired", _request(countdown))
            chosen = choose(countdowns)
            if chosen is None or chosen.is_orphan:
                logger.info("process %s is left alone: its timers name no signal, or it has ended", pid)
                continue
            expiries.note(pid, str(chosen))
            if signal_process(pid, _request(chosen).signal):
                self._log_event("kill worker process", _request(chosen))


def choose(countdowns: list[Countdown]) -> Countdown | None:
    """Return the timer by which a process is ended: the first that names a signal.

    Args:
        countdowns: The process's timers that have expired, the earliest first.
    """
    return next((countdown for countdown in countdowns if _request(countdown).signal > 0), None)


def _request(countdown: Countdown) -> FileTimerRequest:
    request: FileTimerRequest = countdown.request  # type: ignore[assignment] # only such come through the pipe
    return request


def _requests(expired: dict[int, list[Countdown]]) -> dict[int, list[FileTimerRequest]]:
    return {pid: [_request(countdown) for countdown in countdowns] for pid, countdowns in expired.items()}
