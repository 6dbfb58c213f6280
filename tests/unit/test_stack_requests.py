"""Requests for the stacks of workers, and workers as the kernel shows them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.failure.stacks import STOPPED, Dump
from elastic_run.diagnosis import kernel_view
from elastic_run.diagnosis.stack_requests import StackRequests
from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import StackPipe
from elastic_run.signals import PYTHON_STACK_SIGNAL, STACK_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Worker:
    """A worker that takes each signal and runs no handler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = Loop()
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self.answer: Callable[[], object] = lambda: None
        for name, found in {
            "find_obstacle": "",
            "threads_that_block": frozenset[str](),
            "takes_signal": True,
            "waits_for_signal": False,
            "is_main_running": False,
            "describe_threads": "",
        }.items():
            monkeypatch.setattr(kernel_view, name, lambda *_, found=found: found)
        monkeypatch.setattr(os, "kill", self._take)
        self.told: list[tuple[int, str]] = []
        pipes = {0: StackPipe(reading, 900)}
        self.requests = StackRequests(self.loop, pipes, lambda rank, text: self.told.append((rank, text)))
        self.signals: list[int] = []

    def _take(self, _pid: int, number: int) -> None:
        self.signals.append(number)
        self.answer()

    def ask(self, wait_limit: float) -> Dump:
        """Ask, and return what came well before the limit."""
        found: list[dict[int, Dump]] = []
        self.requests.ask({0: 4711}, wait_limit, found.append)
        assert self.loop.run_until(lambda: bool(found), self.loop.now() + wait_limit / 3)
        return found[0][0]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Give a worker."""
    made = Worker(monkeypatch)
    with made.loop:
        yield made
        made.requests.close()
    if made.writing >= 0:
        os.close(made.writing)


def test_a_worker_that_ends_during_the_request_is_not_waited_for(worker: Worker) -> None:
    """Its pipe ends without a text."""

    def end() -> None:
        os.close(worker.writing)
        worker.writing = -1

    worker.answer = end
    assert worker.ask(60.0) == Dump(problem="has ended")
    assert worker.signals == [PYTHON_STACK_SIGNAL]


def test_the_text_is_read_to_its_mark(worker: Worker) -> None:
    """Python's handler writes a few characters at a time; what it writes between its marks is the answer."""

    def write_rest() -> None:
        os.write(worker.writing, b"0x0f\x03noise")

    def begin() -> None:
        os.write(worker.writing, b"noise\x02Thread ")
        worker.loop.call_later(0.05, write_rest)

    worker.answer = begin
    assert worker.ask(60.0) == Dump(text="Thread 0x0f")
    assert worker.requests.received == {0: 23}


def test_a_text_that_nobody_has_asked_for_is_dropped(worker: Worker) -> None:
    """It would fill the pipe, and block the worker."""
    os.write(worker.writing, b"\x02old\x03")
    assert worker.loop.run_until(lambda: worker.requests.received == {0: 5}, worker.loop.now() + 20.0)
    worker.answer = lambda: os.write(worker.writing, b"\x02new\x03")
    assert worker.ask(60.0).text == "new"
    assert worker.ask(60.0).text == "new"


def test_what_a_worker_tells_of_its_exception_is_no_part_of_its_stacks(worker: Worker) -> None:
    """It comes before, behind or without a question, and in parts."""
    os.write(worker.writing, b"\x05first\x06noise\x05sec")
    assert worker.loop.run_until(lambda: worker.requests.received == {0: 16}, worker.loop.now() + 20.0)
    assert worker.told == [(0, "first")]
    worker.answer = lambda: os.write(worker.writing, b"ond\x06\x02stack\x03")
    assert worker.ask(60.0).text == "stack"
    assert worker.told == [(0, "first"), (0, "second")]


_NO_PID = 2**22 + 1


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give process 7 the threads 7, 8 and 9."""
    monkeypatch.setattr(kernel_view, "_threads", lambda _: ["7", "8", "9"])


def let_states(monkeypatch: pytest.MonkeyPatch, **states: str) -> None:
    """Let the kernel show states: `p7` of a process, `t8` of its thread; no other process is there."""

    def read_stat(task: int | str) -> SimpleNamespace | None:
        name = f"p{task}" if isinstance(task, int) else f"t{task.rpartition('/')[2]}"
        return SimpleNamespace(state=states[name].encode()) if name in states else None

    monkeypatch.setattr(kernel_view, "read_stat", read_stat)


@pytest.mark.parametrize(
    ("state", "where", "is_pending", "expected"),
    [
        ("T", "", True, STOPPED),
        ("t", "", True, "is stopped by a debugger"),
        ("Z", "", True, "has ended"),
        ("D", "nfs_wait", True, "is in uninterruptible sleep in the kernel (nfs_wait)"),
        ("D", "", True, "is in uninterruptible sleep in the kernel"),
        ("R", "", True, "has got no processor time to write its stacks"),
        ("S", "", True, f"blocks signal {STACK_SIGNAL}"),
        ("S", "", False, f"has a handler of its own for signal {STACK_SIGNAL}"),
    ],
)
def test_why_a_worker_is_silent(
    monkeypatch: pytest.MonkeyPatch, state: str, where: str, expected: str, *, is_pending: bool
) -> None:
    """Each state of the process, and of the signal, has its reason."""
    let_states(monkeypatch, p7=state)
    monkeypatch.setattr(kernel_view, "wait_channel", lambda _: where)
    monkeypatch.setattr(kernel_view, "is_pending", lambda _: is_pending)
    assert kernel_view.explain_silence(7) == expected


def test_a_process_that_is_gone_has_ended() -> None:
    """The reason is the same before and after the request for its stacks."""
    assert kernel_view.explain_silence(_NO_PID) == "has ended"
    assert kernel_view.find_obstacle(_NO_PID, None) == "has ended"


@pytest.mark.usefixtures("show")
@pytest.mark.parametrize(("others", "expected"), [("SS", True), ("SR", False), ("RS", False), ("DS", True)])
def test_a_process_is_calm_where_no_thread_but_the_first_runs(
    monkeypatch: pytest.MonkeyPatch, others: str, *, expected: bool
) -> None:
    """The handler of faulthandler reads the frames of other threads, which must not change meanwhile."""
    let_states(monkeypatch, t7="R", t8=others[0], t9=others[1])
    assert kernel_view.is_calm(7) is expected
