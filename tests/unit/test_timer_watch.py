"""The workers' timers in the agent's loop: whose timers count, and until when."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from elastic_run.agent.driver.timers import TimerWatch, WorkerTimers, timer_exception
from elastic_run.contract import TIMER_EXPIRED
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.timer.countdowns import record_expiry
from elastic_run.timer.timer_file import FileTimerRequest
from tests.support.stream_bench import Clockwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.timer.timer_file import TimerFile


class _Loop(Clockwork):
    """A loop with one descriptor, which the test makes readable."""

    def add_reader(self, _fd: int, callback: Callable[[], None]) -> None:
        """Call `read` from now on."""
        self.read = callback

    def remove_reader(self, _fd: int) -> None:
        """Call it no more."""


class _Watch:
    """The timers of an agent without workers."""

    def __init__(self) -> None:
        self.requests: list[FileTimerRequest] = []
        self.lines: list[str] = []
        self.loop = _Loop()
        self.watch = TimerWatch(
            cast("Loop", self.loop),
            cast("TimerFile", SimpleNamespace(fd=7, path="", say=None, read=self._take)),
            ranks=dict,
            say=self.lines.append,
            on_event=lambda *_: None,
        )

    def _take(self) -> list[FileTimerRequest]:
        taken, self.requests = self.requests, []
        return taken

    def ask(self, scope: str) -> None:
        """Ask in this process, which is no worker, for a timer that has expired."""
        self.requests = [FileTimerRequest(os.getpid(), scope, time.time() - 1.0)]
        self.loop.read()


def test_a_timer_of_another_process_is_told_once() -> None:
    """It has no effect, and one line says so."""
    watch = _Watch()
    for scope in ("one", "two"):
        watch.ask(scope)
        watch.loop.advance(1.0)
    (line,) = watch.lines
    assert line.startswith("timer scope 'one' expired")
    assert line.endswith(f"in process {os.getpid()}, which is not a worker: the timer has no effect")


def test_no_timer_is_waited_for_after_the_job() -> None:
    """A timer that runs when the watch is closed expires no more."""
    watch = _Watch()
    watch.ask("one")
    watch.loop.timers.clear()
    watch.watch.close()
    assert watch.loop.timers == []


def test_the_pipe_is_in_the_directory_that_is_removed_with_the_launcher(tmp_path: Path) -> None:
    """Or in a directory of its own, which is removed with it."""
    given = WorkerTimers(str(tmp_path), {})
    assert (given.file.path, given.own_directory) == (str(tmp_path / "timers"), "")
    given.close()
    own = WorkerTimers("", {})
    made = Path(own.own_directory)
    assert Path(own.file.path) == made / "timers"
    own.close()
    assert not made.exists()


def test_a_worker_that_no_timer_has_ended_has_its_own_exception() -> None:
    """One that a timer has ended has the timer, once, with the lines of its exception."""
    said = ExceptionText("ValueError", "no", ("a line",), "train.py:3 in main")
    assert timer_exception(4711, said) is said
    record_expiry(4711, "scope 'a' expired after 3 s")
    told = timer_exception(4711, said)
    assert told == ExceptionText(TIMER_EXPIRED, "scope 'a' expired after 3 s", ("a line",), "train.py:3 in main")
    assert timer_exception(4711, None) is None
