"""Countdown timers: scopes, requests and clocks."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from elastic_run import timer
from elastic_run.timer import expiries, timer_file
from elastic_run.timer.countdowns import Countdowns
from elastic_run.timer.file_based_local_timer import choose
from elastic_run.timer.local_timer import MultiprocessingRequestQueue
from elastic_run.timer.requests import read_request
from elastic_run.timer.signal_process import signal_process
from elastic_run.timer.timer_file import TimerFile, _alone, has_reader, write_line

if TYPE_CHECKING:
    from pathlib import Path

    Event = tuple[str, timer.FileTimerRequest | None]


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
def test_a_request_survives_its_json() -> None:
    """A request that is written and read again is the same; one with another signal is not."""
    request = timer.FileTimerRequest(7, 'a "{" scope\n', 12.5, signal.SIGTERM)
    assert read_request(request.to_json().encode()) == request
    assert read_request(b"half a li" + request.to_json().encode()) == request
    assert request != timer.FileTimerRequest(7, 'a "{" scope\n', 12.5, signal.SIGKILL)
    assert timer.TimerRequest(7, "a", 1) == timer.TimerRequest(7, "a", 1) != timer.TimerRequest(8, "a", 1)


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
    countdowns.register([timer.TimerRequest("a", "step", clocks.wall + 10)])
    clocks.wall += 86400
    assert not countdowns.expired()
    assert countdowns.seconds_left == 10
    clocks.wall -= 2 * 86400
    clocks.now += 10
    (found,) = countdowns.expired()["a"]
    assert str(found) == "scope 'step' expired after 10 s"
    assert countdowns.seconds_left == 0


def test_timers_are_renewed_released_and_cleared() -> None:
    """One timer for each worker and scope; a release of none is no matter."""
    clocks = _Clocks()
    countdowns = clocks.countdowns()
    wall = clocks.wall
    countdowns.register(timer.TimerRequest(*args) for args in [("a", "x", wall + 5), ("a", "y", wall + 3)])
    countdowns.register(timer.TimerRequest(*args) for args in [("a", "x", wall + 9), ("b", "x", wall + 1)])
    countdowns.register([timer.TimerRequest("c", "x", -1)])
    clocks.pass_time(20)
    scopes = {who: [one.request.scope_id for one in found] for who, found in countdowns.expired().items()}
    assert scopes == {"a": ["y", "x"], "b": ["x"]}
    assert set(countdowns.expired(wall + 3)) == {"a", "b"}
    assert set(countdowns.expired(wall + 1)) == {"b"}
    countdowns.register([timer.TimerRequest("a", "y", -1)])
    countdowns.clear({"b"})
    assert len(countdowns) == 1
    assert set(countdowns.expired()) == {"a"}
    countdowns.clear_all()
    assert countdowns.next_deadline is None


def test_only_a_negative_time_ends_a_timer() -> None:
    """A timer that expires at time 0, the beginning of the epoch, has expired."""
    countdowns = _Clocks().countdowns()
    countdowns.register([timer.TimerRequest("a", "x", 0), timer.TimerRequest("b", "x", -0.5)])
    assert set(countdowns.expired()) == {"a"}


@pytest.mark.parametrize(("signals", "chosen"), [((0, 1), 1), ((-1, 0), None), ((15, 9), 15), ((), None)])
def test_a_process_is_ended_by_its_first_timer_with_a_signal(signals: tuple[int, ...], chosen: int | None) -> None:
    """A signal is any number above 0, SIGHUP (1) too."""
    countdowns = _Clocks().countdowns()
    countdowns.register(timer.FileTimerRequest(7, str(at), 1 + at, number) for at, number in enumerate(signals))
    found = choose(countdowns.expired().get(7, []))
    assert (None if found is None else cast("timer.FileTimerRequest", found.request).signal) == chosen


def test_a_timer_without_end_is_waited_for_in_pieces() -> None:
    """An infinite or huge span is no error of a system call."""
    clocks = _Clocks()
    countdowns = clocks.countdowns()
    countdowns.register([timer.TimerRequest("a", "x", math.inf), timer.TimerRequest("b", "x", 1e300)])
    assert 0 < (countdowns.seconds_left or 0) < 2**31 / 1000
    with pytest.raises(ValueError, match="'x': its expiration time is nan"):
        countdowns.register([timer.TimerRequest("a", "x", math.nan)])


def test_a_pid_that_was_given_again_is_another_process(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer of a process that has ended is nobody else's."""
    countdowns = Countdowns()
    countdowns.register([timer.TimerRequest(sleeper.pid, "x", 1)])
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
    countdowns.register([timer.TimerRequest("a", "x", clocks.wall + span)])
    clocks.pass_time(100)
    assert str(countdowns.expired()["a"][0]) == f"scope 'x' expired after {told}"


def test_a_process_that_may_not_be_signalled_is_not_done_with(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that got the signal, or has ended, needs no other; another user's process counts as not ended."""
    assert signal_process(sleeper.pid, signal.SIGKILL)
    sleeper.wait()
    assert signal_process(sleeper.pid, signal.SIGKILL)

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    assert not signal_process(sleeper.pid, signal.SIGKILL)


def test_only_the_last_expiries_are_kept() -> None:
    """What is noted for the report is bounded, and told once."""
    for pid in range(5000):
        expiries.note(pid, str(pid))
    assert (expiries.take(4999), expiries.take(4999), expiries.take(1)) == ("4999", "", "")
    for pid in range(5000):
        expiries.take(pid)


def test_an_expiry_that_is_noted_again_is_the_last_one() -> None:
    """Of two notes about one process, the later one counts."""
    for pid in (1, 2, 1, *range(3, 1026)):
        expiries.note(pid, str(pid))
    assert (expiries.take(1), expiries.take(2)) == ("1", "")
    for pid in range(5000):
        expiries.take(pid)


def test_a_request_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A training sends two requests in each step, so an open descriptor for each would use them up."""
    pipe = TimerFile(str(tmp_path / "pipe"), pytest.fail)
    before = psutil.Process().num_fds()
    write_line(pipe.path, b"\n", 1.0)
    assert psutil.Process().num_fds() == before
    pipe.close()


def test_the_question_whether_a_process_runs_does_not_end_it(sleeper: subprocess.Popen[bytes]) -> None:
    """A process that has ended does not run."""
    assert timer.FileTimerServer.is_process_running(sleeper.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.05)
    sleeper.kill()
    sleeper.wait()
    assert not timer.FileTimerServer.is_process_running(sleeper.pid)


@pytest.mark.parametrize("is_relative", [False, True])
def test_one_process_at_a_time_makes_a_pipe_in_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_relative: bool
) -> None:
    """The lock is on the directory of the pipe, so other directories are not locked."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path if is_relative else tmp_path / "other")
    descriptors = [os.open(path, os.O_RDONLY) for path in (tmp_path, tmp_path / "other")]
    try:
        with _alone("pipe" if is_relative else str(tmp_path / "pipe")):
            fcntl.flock(descriptors[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_another_lock_on_the_directory_delays_a_pipe_and_does_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user who can read a shared directory can lock it, for ever; an agent's lock ends at once."""
    pauses: list[float] = []
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(timer_file, "time", SimpleNamespace(sleep=pauses.append))
    pipe = TimerFile(str(tmp_path / "pipe"), pytest.fail)
    assert has_reader(pipe.path)
    assert sum(pauses) == pytest.approx(1.0)

    def release(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(held)

    pauses.clear()
    monkeypatch.setattr(timer_file, "time", SimpleNamespace(sleep=release))
    pipe.close()
    assert len(pauses) == 3
    assert not (tmp_path / "pipe").exists()


def test_a_queue_that_is_asked_without_a_wait_is_not_waited_for() -> None:
    """A server that has an expired timer looks into the queue and goes on."""
    waits: list[float] = []

    class Empty:
        """A program's own queue, which has no requests."""

        def get(self, timeout: float) -> None:
            """Refuse."""
            waits.append(timeout)
            raise queue.Empty

    asked: Any = Empty()
    assert MultiprocessingRequestQueue(asked).get(1, 0.0) == []
    assert waits == [0.0]


class _Server(timer.TimerServer):
    """A program's own server. One worker has a timer that has expired."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_ended = False
        super().__init__(cast("Any", self), 20.0)

    def size(self) -> int:
        """Return that there are no requests."""
        return 0

    def get(self, _size: int, _timeout: float) -> list[timer.TimerRequest]:
        """Wait for the end."""
        self.gate.wait(20)
        time.sleep(0.05)
        self.has_ended = True
        return []

    def register_timers(self, timer_requests: list[timer.TimerRequest]) -> None:
        """Forget them."""

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Do nothing."""

    def get_expired_timers(self, deadline: float) -> dict[str, list[timer.TimerRequest]]:
        """Return one worker with two."""
        return {"worker 7": [timer.TimerRequest("worker 7", scope, deadline) for scope in ("step", "save")]}

    def _reap_worker(self, worker_id: object) -> bool:
        return bool(worker_id)

    def _wake(self) -> None:
        self.gate.set()


def test_a_server_has_ended_when_stop_returns(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread uses the queue no more; the log has told which scopes of a worker expired."""
    caplog.set_level("INFO")
    server = _Server()
    server.start()
    server.stop()
    assert server.has_ended
    assert "worker worker 7 is ended: its timers ['step', 'save'] expired" in caplog.messages
