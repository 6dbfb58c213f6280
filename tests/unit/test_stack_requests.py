"""The request for the stacks of workers, whose processes and pipes the test gives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.diagnosis.stacks import Dump
from elastic_run.diagnosis import kernel_view
from elastic_run.diagnosis.stack_requests import StackRequests
from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.stack_pipe import StackPipe
from elastic_run.signals import PYTHON_STACK_SIGNAL

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
