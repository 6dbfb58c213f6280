"""Countdown timers: the pipe, and its server with processes of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run import timer
from elastic_run.timer.countdowns import pop_expiry
from elastic_run.timer.timer_file import TimerFile
from tests.support.programs import write_line
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Event = tuple[str, timer.FileTimerRequest | None]


pytestmark = pytest.mark.usefixtures("no_timer_client")


# --- the pipe --------------------------------------------------------------------------------------------------------


def test_the_pipe_takes_the_place_of_nothing_that_matters(tmp_path: Path) -> None:
    """A stale pipe and an empty file are replaced; a file, a directory and a pipe with a reader are not."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = TimerFile(str(path), pytest.fail)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError, match="another timer server reads there"):
        TimerFile(str(path), pytest.fail)
    pipe.close()
    pipe.close()
    path.touch()
    TimerFile(str(path), pytest.fail).close()
    path.write_text("a user's work", encoding="utf-8")
    with pytest.raises(FileExistsError, match="something else stands there"):
        TimerFile(str(path), pytest.fail)
    with pytest.raises(FileExistsError, match="something else stands there"):
        TimerFile(str(tmp_path), pytest.fail)
    with pytest.raises(FileNotFoundError, match="the timers' pipe can't be made: No such file"):
        TimerFile(str(tmp_path / "no" / "pipe"), pytest.fail)


def test_a_pipe_that_somebody_replaced_is_left_alone(tmp_path: Path) -> None:
    """Only what this server made is removed at its end."""
    path = tmp_path / "pipe"
    pipe = TimerFile(str(path), pytest.fail)
    path.unlink()
    path.touch()
    pipe.close()
    assert path.exists()


# --- the server of the pipe ------------------------------------------------------------------------------------------
@pytest.fixture
def events() -> list[Event]:
    """Give a list for a server's events."""
    return []


@pytest.fixture
def server(tmp_path: Path, events: list[Event]) -> Iterator[timer.FileTimerServer]:
    """Give a server that is not started."""
    made = timer.FileTimerServer(
        str(tmp_path / "pipe"), "run", max_interval=60, log_event=lambda name, request: events.append((name, request))
    )
    yield made
    made.stop()


def _request(pid: int, scope: str, after: float, number: int = signal.SIGKILL) -> timer.FileTimerRequest:
    return timer.FileTimerRequest(pid, scope, time.time() + after if after >= 0 else -1, number)


def _send(path: Path, pid: int, scope: str, after: float, number: int = signal.SIGKILL) -> timer.FileTimerRequest:
    """Write what a client in that process would."""
    request = _request(pid, scope, after, number)
    write_line(str(path / "pipe"), request.to_json().encode() + b"\n")
    return request


def test_the_server_ends_the_process_and_nobody_else(
    server: timer.FileTimerServer, events: list[Event], sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The named process gets the named signal at the deadline, whatever max_interval is; this process lives."""
    server.start()
    _send(tmp_path, os.getpid(), "mine", 60)
    _send(tmp_path, sleeper.pid, "quiet", 0.05, 0)
    request = _send(tmp_path, sleeper.pid, "step", 0.1, signal.SIGTERM)
    assert sleeper.wait(DEADLINE) == -signal.SIGTERM
    wait_until(lambda: ("kill worker process", request) in events)
    assert re.fullmatch(r"scope 'step' expired after 0(\.\d+)? s", pop_expiry(sleeper.pid))
    assert [name for name, _ in events] == ["watchdog started", "timer expired", "timer expired", "kill worker process"]
    assert abs(server.get_last_progress_time() - time.time()) < DEADLINE
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < stretched(DEADLINE)
    assert not (tmp_path / "pipe").exists()


def test_the_server_waits_until_the_next_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timer it waits for requests only; with one as long as that runs, and no longer."""
    waits: list[float | None] = []
    make = select.poll

    class NotingPoll:
        def __init__(self) -> None:
            self._poll = make()
            self.register = self._poll.register

        def poll(self, timeout: float | None) -> list[tuple[int, int]]:
            if threading.current_thread().name == "timers":
                waits.append(timeout)
            return self._poll.poll(timeout)

    monkeypatch.setattr(select, "poll", NotingPoll)
    server = timer.FileTimerServer(str(tmp_path / "pipe"), "job")
    server.start()
    _send(tmp_path, os.getpid(), "step", 3000)
    wait_until(lambda: len(waits) > 1)
    server.stop()
    first, second, *_ = waits
    assert first is None
    assert second is not None
    assert 2_000_000 < second <= 3_000_000


def test_a_released_timer_does_not_expire(
    server: timer.FileTimerServer, events: list[Event], sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A scope that was left in time is forgotten, and one of a process that has ended is nobody's."""
    with subprocess.Popen(["true"]) as ended:
        pass
    server.start()
    left_in_time = [_request(sleeper.pid, "step", after).to_json() for after in (0.05, -1)]
    write_line(str(tmp_path / "pipe"), "".join(f"{line}\n" for line in left_in_time).encode())
    _send(tmp_path, ended.pid, "gone", 0.1)
    _send(tmp_path, sleeper.pid, "last", 0.2, 0)
    wait_until(lambda: ("timer expired", "last") in [(name, request and request.scope_id) for name, request in events])
    assert sleeper.poll() is None
    assert "kill worker process" not in [name for name, _ in events]
