"""Countdown timers: scopes, the pipe, requests and clocks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import timer
from elastic_run.timer.timer_file import ScopeTimer, TimerFile, read_request
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path


class _Recorded(timer.TimerClient):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.asked.append((scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.asked.append((scope_id, -1))


class _Clocks:
    """A monotonic clock and a wall clock that are set by hand."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, 1_000_000.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


pytestmark = pytest.mark.usefixtures("no_timer_client")


# --- expires ---------------------------------------------------------------------------------------------------------
def test_a_scope_is_acquired_and_released() -> None:
    """The server is told of the scope, when it expires, and that it was left, also by an exception."""
    client = _Recorded()
    timer.configure(client)
    before = time.time()
    with pytest.raises(KeyError), timer.expires(after=5, scope="step"):
        raise KeyError
    (acquired, expiration), released = client.asked
    assert (acquired, released) == ("step", ("step", -1))
    assert before + 5 <= expiration <= time.time() + 5


def test_a_scope_without_a_name_has_the_line_s() -> None:
    """Two scopes of one function are two timers, named after the lines that opened them."""
    client = _Recorded()
    first = sys._getframe().f_lineno + 1
    with timer.expires(after=5, client=client):
        client.asked.append(("between", 0))
        with timer.expires(after=5, client=client):
            pass

    @timer.expires(after=5, client=client)
    def step() -> None:
        """Stand for a training step."""

    del client.asked[1]
    assert [scope for scope, _ in client.asked] == [f"{__file__}#{first + line}" for line in (0, 2, 2, 0)]
    client.asked.clear()
    step()
    step()
    assert [scope for scope, _ in client.asked] == [f"{__file__}#{first + 5}"] * 4


def test_without_a_client_it_says_what_to_do() -> None:
    """Neither configured nor started by a launcher that serves timers: RuntimeError with both ways out."""
    with pytest.raises(RuntimeError, match=r"timer\.configure.*TORCHELASTIC_ENABLE_FILE_TIMER"), timer.expires(after=5):
        pass


def test_under_elastic_run_nothing_has_to_be_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's file is used where it is named in the environment."""
    pipe = TimerFile(str(tmp_path / "pipe"), pytest.fail)
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", pipe.path)
    registered: list[tuple[int, str, int, bool]] = []
    monkeypatch.setattr(
        pipe,
        "register",
        lambda each: registered.append((each.worker_pid, each.scope_id, each.signal, each.expiration_time < 0)),
    )
    with timer.expires(after=5, scope="step"):
        pass
    pipe.read()
    pipe.close()
    assert registered == [(os.getpid(), "step", signal.SIGKILL, False), (os.getpid(), "step", 0, True)]


# --- the pipe --------------------------------------------------------------------------------------------------------
def test_one_of_several_agents_gets_the_pipe(tmp_path: Path) -> None:
    """They begin at the same moment, with one path: the others find it in use, and the winner reads what is there."""
    for number in range(50):
        path, start, pipes = tmp_path / f"{number}", threading.Barrier(3), list[TimerFile]()

        def make(path: Path = path, start: threading.Barrier = start, pipes: list[TimerFile] = pipes) -> None:
            start.wait(DEADLINE)
            with contextlib.suppress(FileExistsError):
                pipes.append(TimerFile(str(path), pytest.fail))

        threads = [threading.Thread(target=make) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        (pipe,) = pipes
        assert path.stat().st_ino == os.fstat(pipe.fd).st_ino
        assert list(tmp_path.iterdir()) == [path]
        pipe.close()


def test_a_pipe_that_somebody_replaced_is_left_alone(tmp_path: Path) -> None:
    """Only what this server made is removed at its end."""
    path = tmp_path / "pipe"
    pipe = TimerFile(str(path), pytest.fail)
    path.unlink()
    path.touch()
    pipe.close()
    assert path.exists()


# --- requests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"pid": "7"},
        {"pid": 0},
        {"pid": 1 << 40},
        {"scope_id": None},
        {"expiration_time": math.nan},
        {"expiration_time": 10**400},
        {"expiration_time": "soon"},
        {"signal": 65},
        {"signal": 9.0},
        {"version": 2},
    ],
)
def test_a_request_with_a_wrong_field_is_none(change: dict[str, Any]) -> None:
    """A worker's line is checked field by field."""
    fields = {"version": 1, "pid": 7, "scope_id": "a", "expiration_time": 1, "signal": 9}
    assert read_request(json.dumps(fields).encode()) == ScopeTimer(7, "a", 1, 9)
    assert read_request(json.dumps(fields | change).encode()) is None


# --- countdowns ------------------------------------------------------------------------------------------------------
@pytest.fixture
def clocks() -> _Clocks:
    """Give two clocks that stand."""
    return _Clocks()


@pytest.fixture
def timers(tmp_path: Path, clocks: _Clocks) -> Iterator[TimerFile]:
    """Give timers that use these clocks."""
    made = TimerFile(str(tmp_path / "pipe"), pytest.fail, clock=lambda: clocks.now, wall_clock=lambda: clocks.wall)
    yield made
    made.close()


def test_the_monotonic_clock_decides(timers: TimerFile, clocks: _Clocks) -> None:
    """Setting the wall clock neither ends a timer nor makes one last."""
    timers.register(ScopeTimer(1, "step", clocks.wall + 10))
    clocks.wall += 86400
    assert not timers.pop_expired()
    assert timers.seconds_left == 10
    clocks.wall -= 2 * 86400
    clocks.now += 10
    assert timers.seconds_left == 0
    (found,) = timers.pop_expired()[1]
    assert str(found) == "scope 'step' expired after 10 s"
    assert timers.seconds_left is None


def test_timers_are_renewed_released_and_cleared(timers: TimerFile, clocks: _Clocks) -> None:
    """One timer for each worker and scope; a release of none is no matter."""
    wall = clocks.wall
    for args in [(1, "x", wall + 5), (1, "y", wall + 3), (1, "z", wall + 1), (1, "x", wall + 9), (2, "x", wall + 1)]:
        timers.register(ScopeTimer(*args))
    timers.register(ScopeTimer(3, "x", -1))
    timers.register(ScopeTimer(1, "z", -1))
    clocks.pass_time(3)
    assert {who: [each.scope_id for each in found] for who, found in timers.pop_expired().items()} == {
        1: ["y"],
        2: ["x"],
    }
    clocks.pass_time(20)
    timers.register(ScopeTimer(1, "y", clocks.wall))
    scopes = {who: [each.scope_id for each in found] for who, found in timers.pop_expired().items()}
    assert scopes == {1: ["x", "y"]}
    timers.register(ScopeTimer(1, "y", clocks.wall))
    timers.clear()
    assert timers.seconds_left is None


def test_a_pid_that_was_given_again_is_another_process(timers: TimerFile, sleeper: subprocess.Popen[bytes]) -> None:
    """The timer of a process that has ended is nobody else's."""
    timers.register(ScopeTimer(sleeper.pid, "x", 1))
    (found,) = timers.pop_expired()[sleeper.pid]
    assert not found.is_orphan
    found.born -= 1
    assert found.is_orphan


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31 - 1])
def test_a_pid_that_no_process_has_is_an_orphan(timers: TimerFile, pid: int) -> None:
    """A timer of a process that has ended before its request was read ends no process."""
    timers.register(ScopeTimer(pid, "x", 1))
    assert timers.pop_expired()[pid][0].is_orphan


@pytest.mark.parametrize(
    ("span", "told"), [(0.004, "0 s"), (0.034, "0.03 s"), (0.49, "0.5 s"), (2.96, "3 s"), (59.8, "60 s"), (-3, "0 s")]
)
def test_a_span_is_as_exact_as_it_can_be(span: float, told: str) -> None:
    """What the request's way took is not told."""
    assert str(ScopeTimer(1, "x", 0, span=span)) == f"scope 'x' expired after {told}"
