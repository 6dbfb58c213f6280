"""Countdown timers: scopes, requests and clocks."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import timer
from elastic_run.timer.countdowns import Countdowns, pop_expiry, record_expiry
from elastic_run.timer.timer_file import FileTimerRequest, TimerFile, read_request

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    Event = tuple[str, FileTimerRequest | None]


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

    def countdowns(self) -> Countdowns:
        return Countdowns(lambda: self.now, lambda: self.wall)

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
    with timer.expires(after=5, scope="step"):
        acquired = pipe.read()
    (released,) = pipe.read()
    pipe.close()
    assert [(request.worker_pid, request.scope_id, request.signal) for request in acquired] == [
        (os.getpid(), "step", signal.SIGKILL)
    ]
    assert (released.scope_id, released.expiration_time) == ("step", -1)


# --- requests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pid": "7"}, "its pid is '7'"),
        ({"pid": True}, "its pid is True"),
        ({"pid": 0}, "its pid is 0"),
        ({"pid": 1 << 40}, "its pid is"),
        ({"scope_id": None}, "its scope_id is None"),
        ({"expiration_time": math.nan}, "its expiration_time is nan"),
        ({"expiration_time": 10**400}, "its expiration_time is 1000"),
        ({"expiration_time": "soon"}, "its expiration_time is 'soon'"),
        ({"signal": 65}, "its signal is 65"),
        ({"signal": 9.0}, "its signal is 9.0"),
        ({"version": 2}, "of version 2, and only 1 is known"),
    ],
)
def test_what_is_no_request_is_named(change: dict[str, Any], reason: str) -> None:
    """Whatever is wrong with a line is one short clause."""
    fields = {"version": 1, "pid": 7, "scope_id": "a", "expiration_time": 1, "signal": 9} | change
    with pytest.raises(ValueError, match=reason):
        read_request(json.dumps(fields).encode())


@pytest.mark.parametrize("line", [b"", b"\x80\x04\x95cos\nsystem\n", b"[" * 100_000, b"[1]", b"{", b'{"pid": 1}', b"7"])
def test_garbage_is_a_value_error(line: bytes) -> None:
    """Neither a pickle nor nested JSON nor half a request is anything else."""
    with pytest.raises(ValueError, match=r"JSON|its \w+ is"):
        read_request(line)


# --- countdowns ------------------------------------------------------------------------------------------------------
def test_the_monotonic_clock_decides() -> None:
    """Setting the wall clock neither ends a timer nor makes one last."""
    clocks = _Clocks()
    countdowns = clocks.countdowns()
    countdowns.register([FileTimerRequest(1, "step", clocks.wall + 10)])
    clocks.wall += 86400
    assert not countdowns.expired()
    assert countdowns.seconds_left == 10
    clocks.wall -= 2 * 86400
    clocks.now += 10
    (found,) = countdowns.expired()[1]
    assert str(found) == "scope 'step' expired after 10 s"
    assert countdowns.seconds_left == 0


def test_timers_are_renewed_released_and_cleared() -> None:
    """One timer for each worker and scope; a release of none is no matter."""
    clocks = _Clocks()
    countdowns = clocks.countdowns()
    wall = clocks.wall
    countdowns.register(FileTimerRequest(*args) for args in [(1, "x", wall + 5), (1, "y", wall + 3)])
    countdowns.register(FileTimerRequest(*args) for args in [(1, "x", wall + 9), (2, "x", wall + 1)])
    countdowns.register([FileTimerRequest(3, "x", -1)])
    clocks.pass_time(20)
    scopes = {who: [one.request.scope_id for one in found] for who, found in countdowns.expired().items()}
    assert scopes == {1: ["y", "x"], 2: ["x"]}
    assert set(countdowns.expired(wall + 3)) == {1, 2}
    assert set(countdowns.expired(wall + 1)) == {2}
    countdowns.register([FileTimerRequest(1, "y", -1)])
    countdowns.clear({2})
    assert set(countdowns.expired()) == {1}
    countdowns.clear()
    assert countdowns.seconds_left is None


def test_a_pid_that_was_given_again_is_another_process(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer of a process that has ended is nobody else's."""
    countdowns = Countdowns()
    countdowns.register([FileTimerRequest(sleeper.pid, "x", 1)])
    (found,) = countdowns.expired()[sleeper.pid]
    assert not found.is_orphan
    monkeypatch.setattr(found.process, "_ident", (sleeper.pid, 0.0))
    assert found.is_orphan


@pytest.mark.parametrize(
    ("span", "told"), [(0.004, "0 s"), (0.034, "0.03 s"), (0.49, "0.5 s"), (2.96, "3 s"), (59.8, "60 s"), (-3, "0 s")]
)
def test_a_span_is_as_exact_as_it_can_be(span: float, told: str) -> None:
    """What the request's way took is not told."""
    clocks = _Clocks()
    countdowns = clocks.countdowns()
    countdowns.register([FileTimerRequest(1, "x", clocks.wall + span)])
    clocks.pass_time(100)
    assert str(countdowns.expired()[1][0]) == f"scope 'x' expired after {told}"


def test_only_the_last_expiries_are_kept() -> None:
    """What is noted for the report is bounded, and told once."""
    for pid in range(5000):
        record_expiry(pid, str(pid))
    assert (pop_expiry(4999), pop_expiry(4999), pop_expiry(1)) == ("4999", "", "")
    for pid in range(5000):
        pop_expiry(pid)
