"""The workers' timers: the agent serves them in its loop if TORCHELASTIC_ENABLE_FILE_TIMER=1 is set.

- The pipe is open before the first worker starts. Only the loop waits on it, and an idle timer costs nothing.
- An expired timer signals the process that it names, if this process is a worker of this round or belongs to a worker's
  session, and no other process. (torch's server signals any process, and then the agent itself.)
- While the round is being stopped, no timer of the round expires: the stop has a grace period of its own.
- If another program removes the pipe, such as a cleaner of old files in /tmp, new timers fail in the workers.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.files import make_temporary
from elastic_run.loop import Loop
from elastic_run.signals import signal_name
from elastic_run.timer.timer_file import TimerFile, has_reader, record_expiry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.events import Event
    from elastic_run.loop import Timer
    from elastic_run.timer.timer_file import ScopeTimer


def open_timer_file(environ: Mapping[str, str], directory: str) -> tuple[TimerFile, str]:
    """Make the pipe at TORCHELASTIC_TIMER_FILE, in `directory`, or in a new directory, which is returned."""
    path = environ.get(contract.ENV_TIMER_FILE)
    # A launcher inside a worker inherits the path of the launcher outside, which reads there. Another agent on this
    # machine may have made the pipe just now.
    if path and not has_reader(path):
        try:
            return TimerFile(path, lambda _: None), ""
        except FileExistsError:
            if not has_reader(path):
                raise
    made = "" if directory else make_temporary("elastic-run-timers-")
    if made is None:
        reason = "there is no place for the timers' pipe: TMPDIR or TORCHELASTIC_TIMER_FILE can name one"
        raise OSError(2, reason, contract.ENV_TIMER_FILE)
    try:
        return TimerFile(os.path.join(directory or made, "timers"), lambda _: None), made
    except OSError:
        if made:
            os.rmdir(made)
        raise


class TimerWatch:
    """Counts down in the loop; `list_ranks` returns ranks by pid, `on_event` gets torch's events."""

    def __init__(
        self,
        loop: Loop,
        file: TimerFile,
        list_ranks: Callable[[], Mapping[int, int]],
        on_event: Callable[[str, ScopeTimer | None], None],
    ) -> None:
        self._loop = loop
        self._file = file
        self._list_ranks = list_ranks
        self._on_event = on_event
        self._timer: Timer | None = None
        self._has_said_foreign = False
        self._loop.add_reader(file.fd, self._read)
        self._on_event("watchdog started", None)

    def clear(self) -> None:
        """Forget the timers that run, as the round ends."""
        self._file.read()
        self._file.clear()
        self._wait()

    def close(self) -> None:
        """Stop counting; the pipe stays."""
        self._loop.remove_reader(self._file.fd)
        self._file.clear()
        self._wait()
        self._on_event("watchdog stopped", None)

    def _read(self) -> None:
        self._file.read()
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._file.seconds_left
        self._timer = None if left is None else self._loop.call_later(left, self._expire)

    def _expire(self) -> None:
        # A release that is in the pipe now came in time.
        self._file.read()
        for pid, timers in self._file.pop_expired().items():
            self._end(pid, timers)
        self._wait()

    def _end(self, pid: int, timers: list[ScopeTimer]) -> None:
        if timers[0].is_orphan:
            return
        leader, rank = self._find_worker(pid)
        if rank is None:
            if not self._has_said_foreign:
                self._has_said_foreign = True
                self._file.say(f"timer {timers[0]} in process {pid}, which is not a worker: the timer has no effect")
            return
        who = f"rank {rank} (pid {pid})"
        for timer in timers:
            self._on_event("timer expired", timer)
        chosen = next((timer for timer in timers if timer.signal > 0), None)
        if chosen is None:
            self._file.say(f"{who}: timer {timers[0]}; it names no signal, so the worker goes on")
            return
        record_expiry(leader, str(chosen) if leader == pid else f"{chosen} in its process {pid}")
        self._file.say(f"{who}: timer {chosen}; it gets {signal_name(chosen.signal)}")
        try:
            os.kill(pid, chosen.signal)
        except OSError as error:
            self._file.say(f"{who} can't be sent {signal_name(chosen.signal)}: {error.strerror}")
            return
        self._on_event("kill worker process", chosen)

    def _find_worker(self, pid: int) -> tuple[int, int | None]:
        """Return the worker to which a process belongs and its rank; each worker leads a session."""
        ranks = self._list_ranks()
        try:
            leader = pid if pid in ranks else os.getsid(pid)
        except OSError:
            leader = pid  # it has ended
        return leader, ranks.get(leader)


class TimerServer:
    """Serves timers in a thread, for an agent that goes through torch's hooks and has no loop."""

    def __init__(
        self, list_ranks: Callable[[], Mapping[int, int]], on_event: Callable[[str, ScopeTimer | None], None]
    ) -> None:
        import logging
        import threading

        self._file, self._directory = open_timer_file(os.environ, "")
        self._file.say = logging.getLogger(__name__).warning
        #: The path of the pipe.
        self.path = self._file.path
        self._loop = Loop()
        self._watch = TimerWatch(self._loop, self._file, list_ranks, on_event)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="timers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_until(lambda: self._is_over)
        self._watch.close()
        self._loop.close()

    def stop(self) -> None:
        """End, and remove the pipe; harmless when that was done."""
        self._is_over = True
        self._loop.call_soon_threadsafe(lambda: None)
        self._thread.join()
        self._file.close()
        if self._directory:
            os.rmdir(self._directory)
            self._directory = ""


def watchdog_event(event: Event, name: str, timer: ScopeTimer | None) -> Event:
    """Make torch's event of a timer."""
    import json

    details = {"watchdog_event": name}
    if timer is not None:
        names = ("worker_pid", "scope_id", "expiration_time", "signal")
        details |= {field: str(getattr(timer, field)) for field in names}
    event.name = name
    event.metadata["metadata"] = json.dumps(details)
    return event
