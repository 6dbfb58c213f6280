"""The workers' timers: the agent serves them in its loop if TORCHELASTIC_ENABLE_FILE_TIMER=1 is set.

- The pipe is open before the first worker starts. Only the loop waits on it, and an idle timer costs nothing.
- An expired timer signals the process that it names, if this process is a worker of this round or belongs to a worker's
  session, and no other process. (torch's server signals any process, and then the agent itself.)
- While the round is being stopped, no timer of the round expires: the stop has a grace period of its own.
- If the launcher is killed, the guardian removes the pipe's directory. If another program removes the pipe, such as a
  cleaner of old files in /tmp, new timers fail in the workers.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.files import make_temporary, random_name
from elastic_run.signals import signal_name
from elastic_run.timer.countdowns import Countdowns, record_expiry
from elastic_run.timer.timer_file import TimerFile, has_reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.events import Event
    from elastic_run.loop import Loop, Timer
    from elastic_run.timer import FileTimerServer
    from elastic_run.timer.countdowns import Countdown
    from elastic_run.timer.timer_file import FileTimerRequest


def open_timer_file(environ: Mapping[str, str], directory: str) -> tuple[TimerFile, str]:
    """Make the pipe where TORCHELASTIC_TIMER_FILE says, or else in a private directory.

    That is `directory`, which the guardian removes, or if there is none ("") a new one, which is returned.

    Raises:
        OSError: The pipe can't be made.
    """
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
    """Counts down in the agent's loop.

    `list_ranks` returns the global rank of each worker that lives, by pid. `on_event` gets torch's events: a name and
    the request, or None.
    """

    def __init__(
        self,
        loop: Loop,
        file: TimerFile,
        list_ranks: Callable[[], Mapping[int, int]],
        on_event: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        self._loop = loop
        self._file = file
        self._list_ranks = list_ranks
        self._on_event = on_event
        self._countdowns = Countdowns()
        self._timer: Timer | None = None
        self._has_said_foreign = False
        self._loop.add_reader(file.fd, self._read)
        on_event("watchdog started", None)

    def clear(self) -> None:
        """Forget the timers that run, as the round ends."""
        self._countdowns.register(self._file.read())
        self._countdowns.clear()
        self._wait()

    def close(self) -> None:
        """Stop counting; the pipe stays."""
        self._loop.remove_reader(self._file.fd)
        self._countdowns.clear()
        self._wait()
        self._on_event("watchdog stopped", None)

    def _read(self) -> None:
        self._countdowns.register(self._file.read())
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._countdowns.seconds_left
        self._timer = None if left is None else self._loop.call_later(left, self._expire)

    def _expire(self) -> None:
        # A release that is in the pipe now came in time.
        self._countdowns.register(self._file.read())
        for pid, countdowns in self._countdowns.pop_expired().items():
            self._end(pid, countdowns)
        self._wait()

    def _end(self, pid: int, countdowns: list[Countdown]) -> None:
        if countdowns[0].is_orphan:
            return
        leader, rank = self._find_worker(pid)
        if rank is None:
            if not self._has_said_foreign:
                self._has_said_foreign = True
                self._file.say(
                    f"timer {countdowns[0]} in process {pid}, which is not a worker: the timer has no effect"
                )
            return
        who = f"rank {rank} (pid {pid})"
        for countdown in countdowns:
            self._on_event("timer expired", countdown.request)
        chosen = next((countdown for countdown in countdowns if countdown.request.signal > 0), None)
        if chosen is None:
            self._file.say(f"{who}: timer {countdowns[0]}; it names no signal, so the worker goes on")
            return
        number = chosen.request.signal
        record_expiry(leader, str(chosen) if leader == pid else f"{chosen} in its process {pid}")
        self._file.say(f"{who}: timer {chosen}; it gets {signal_name(number)}")
        try:
            os.kill(pid, number)
        except OSError as error:
            self._file.say(f"{who} can't be sent {signal_name(number)}: {error.strerror}")
            return
        self._on_event("kill worker process", chosen.request)

    def _find_worker(self, pid: int) -> tuple[int, int | None]:
        """Return the worker to which a process belongs and its rank; each worker leads a session."""
        ranks = self._list_ranks()
        try:
            leader = pid if pid in ranks else os.getsid(pid)
        except OSError:
            leader = pid  # it has ended
        return leader, ranks.get(leader)


def start_timer_server(
    run_id: str, on_event: Callable[[str, FileTimerRequest | None], None]
) -> tuple[FileTimerServer, str]:
    """Serve timers in a thread, for an agent that has no loop; return the server and the path of its pipe."""
    import tempfile

    from elastic_run.timer import FileTimerServer

    path = os.environ.get(contract.ENV_TIMER_FILE)
    if not path or has_reader(path):
        path = os.path.join(tempfile.gettempdir(), f"elastic-run-timers-{random_name()}")
    server = FileTimerServer(path, run_id, log_event=on_event)
    server.start()
    return server, path


def watchdog_event(event: Event, name: str, request: FileTimerRequest | None) -> Event:
    """Make torch's event of a timer."""
    import json

    details = {"watchdog_event": name}
    if request is not None:
        names = ("worker_pid", "scope_id", "expiration_time", "signal")
        details |= {field: str(getattr(request, field)) for field in names}
    event.name = name
    event.metadata["metadata"] = json.dumps(details)
    return event
