"""Countdown timers: the server of the queue, and a server written for torch."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing as mp
import queue
import re
import signal
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import timer
from elastic_run.timer import expiries
from elastic_run.timer.local_timer import MultiprocessingRequestQueue
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    import subprocess

    Event = tuple[str, timer.FileTimerRequest | None]


pytestmark = pytest.mark.usefixtures("no_timer_client")


# --- the server of the queue -----------------------------------------------------------------------------------------
def _hang(requests: mp.Queue[Any], after: float) -> None:
    timer.configure(timer.LocalTimerClient(requests))
    with timer.expires(after=60, scope="outer"), timer.expires(after=after, scope="step"):
        signal.pause()


def _pass_by(requests: mp.Queue[Any]) -> None:
    timer.configure(timer.LocalTimerClient(requests))
    for _ in range(10):
        with timer.expires(after=60, scope="step"):
            pass


def test_the_queue_s_server_kills_the_process_that_hangs() -> None:
    """At its deadline, though max_interval is a minute; the other process ends by itself."""
    context = mp.get_context("fork")
    requests: mp.Queue[Any] = context.Queue()
    server = timer.LocalTimerServer(requests, max_interval=60)
    server.start()
    hanging = context.Process(target=_hang, args=(requests, 0.2))
    passing = context.Process(target=_pass_by, args=(requests,))
    hanging.start()
    passing.start()
    hanging.join(DEADLINE)
    passing.join(DEADLINE)
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < stretched(DEADLINE)
    assert (hanging.exitcode, passing.exitcode) == (-signal.SIGKILL, 0)
    assert re.search(r"scope 'step' expired after 0(\.\d+)? s", expiries.take(hanging.pid or 0))
    wait_until(lambda: server._timers.next_deadline is None)
    requests.close()
    requests.join_thread()


def test_what_is_no_request_in_the_queue_is_dropped(
    sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Anything may be put into a queue; the timers of the others go on."""
    requests: Any = queue.Queue()
    server = timer.LocalTimerServer(requests, max_interval=60)
    server.start()
    for thing in (None, "x", timer.TimerRequest(sleeper.pid, [], 1), timer.TimerRequest(sleeper.pid, "x", math.nan)):  # type: ignore[arg-type] # that is the point
        requests.put(thing)
    requests.put(timer.TimerRequest(sleeper.pid, "x", 1))
    assert sleeper.wait(DEADLINE) == -signal.SIGKILL
    server.stop()
    assert caplog.text.count("is not a request, and is ignored") == 4


def test_the_queue_s_server_waits_for_its_next_deadline() -> None:
    """Without timers it waits for ever, whatever max_interval is: an idle server costs nothing."""
    server = timer.LocalTimerServer(mp.get_context("fork").Queue(), max_interval=0.01)
    assert server._seconds_to_wait() == math.inf
    server.register_timers([timer.TimerRequest(1, "x", time.time() + 50)])
    assert 40 < server._seconds_to_wait() <= 50
    server.stop()


def test_the_queue_s_server_forgets_the_timers_of_a_worker(sleeper: subprocess.Popen[bytes]) -> None:
    """`clear_timers` forgets those of the named workers, and no other; a worker that is ended counts as done."""
    server = timer.LocalTimerServer(mp.get_context("fork").Queue())
    now = time.time()
    server.register_timers([timer.TimerRequest(pid, "x", now - 1) for pid in (sleeper.pid, 1)])
    server.clear_timers({1})
    assert set(server.get_expired_timers(now)) == {sleeper.pid}
    assert server._reap_worker(sleeper.pid)
    assert sleeper.wait(DEADLINE) == -signal.SIGKILL
    server.stop()


@pytest.mark.parametrize("package", ["torch.distributed.elastic.timer", "elastic_run.timer"])
def test_one_look_at_an_empty_queue_comes_back(package: str) -> None:
    """A program that takes the server's step by itself gets it back after max_interval, from torch's and from ours."""
    server = import_module(package).LocalTimerServer(mp.get_context("fork").Queue(), max_interval=0.01)
    look = threading.Thread(target=server._run_watchdog, daemon=True)
    look.start()
    look.join(DEADLINE)
    assert not look.is_alive()


def test_requests_are_taken_from_the_queue_within_bounds() -> None:
    """`get` gives what is there, up to the number asked for, and waits no longer than it may."""
    context = mp.get_context("fork")
    source: mp.Queue[Any] = context.Queue()
    requests = MultiprocessingRequestQueue(source)
    assert requests.get(1, 0) == []
    for number in range(3):
        source.put(timer.TimerRequest(number, "x", 1))
    wait_until(lambda: requests.size() == 3)
    assert [request.worker_id for request in requests.get(2, DEADLINE)] == [0, 1]
    assert [request.worker_id for request in requests.get(2, 0.05)] == [2]
    requests.wake()
    assert [request.expiration_time for request in requests.get(1, DEADLINE)] == [-1]
    source.close()
    requests.wake()
    source.join_thread()


class _TorchStyle(timer.TimerServer):
    """A server as somebody wrote it for torch."""

    def __init__(self, source: timer.RequestQueue, max_interval: float = 0.01) -> None:
        super().__init__(source, max_interval)
        self.timers: dict[Any, timer.TimerRequest] = {}
        self.reaped: list[str] = []

    def register_timers(self, timer_requests: list[timer.TimerRequest]) -> None:
        self.timers |= {request.worker_id: request for request in timer_requests}

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker in worker_ids:
            self.timers.pop(worker, None)

    def get_expired_timers(self, deadline: float) -> dict[str, list[timer.TimerRequest]]:
        return {who: [request] for who, request in self.timers.items() if request.expiration_time <= deadline}

    def _reap_worker(self, worker_id: str) -> bool:
        self.reaped.append(worker_id)
        if worker_id == "broken":
            raise KeyError(worker_id)
        return worker_id != "stubborn" or self.reaped.count("stubborn") > 1


class _Requests(timer.RequestQueue):
    """A queue as somebody wrote it for torch; its second look fails."""

    def __init__(self) -> None:
        self.batches: list[Any] = [[timer.TimerRequest(who, "x", 1) for who in ("a", "broken", "stubborn")], OSError(5)]

    def size(self) -> int:
        return 0

    def get(self, size: int, timeout: float) -> list[timer.TimerRequest]:
        assert (size, timeout) == (1, 0.01)
        batch = self.batches.pop(0) if self.batches else []
        if isinstance(batch, Exception):
            raise batch
        return list(batch)


def test_a_server_written_for_torch_works(caplog: pytest.LogCaptureFixture) -> None:
    """Every expired worker is reaped; one that can't be is tried again, and errors are logged."""
    server = _TorchStyle(_Requests())
    with caplog.at_level(logging.ERROR):
        server.start()
        wait_until(lambda: not server.timers and server.reaped)
        server.stop()
    server.stop()
    assert sorted(server.reaped) == ["a", "broken", "stubborn", "stubborn"]
    assert "_reap_worker raised" in caplog.text
    assert "error in a timer server's loop" in caplog.text


class _Closed(timer.RequestQueue):
    """A queue that fails each time, and notes when it was asked; the third time it stops its server."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.server: timer.TimerServer | None = None

    def size(self) -> int:
        return 0

    def get(self, size: int, timeout: float) -> list[timer.TimerRequest]:  # noqa: ARG002 - the interface's
        self.asked.append(time.monotonic())
        if len(self.asked) == 3 and self.server is not None:
            self.server.stop()
        raise OSError(errno.EBADF, "closed")


def test_a_server_whose_queue_fails_does_not_spin() -> None:
    """After an error it pauses for max_interval, and not for long after it was stopped."""
    requests = _Closed()
    requests.server = server = _TorchStyle(requests, max_interval=0.05)
    server._watchdog_loop()
    first, second, third = requests.asked
    assert min(second - first, third - second) >= 0.05


def test_a_pause_after_an_error_ends_with_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it was to be."""
    monkeypatch.setattr("elastic_run.timer.api._PAUSE", DEADLINE)
    server = _TorchStyle(_Closed(), max_interval=DEADLINE)
    with caplog.at_level(logging.ERROR):
        server.start()
        wait_until(lambda: "error in a timer server's loop" in caplog.text)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < DEADLINE
