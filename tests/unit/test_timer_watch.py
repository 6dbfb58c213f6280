"""The workers' timers in the agent's loop: whose timers count, and until when."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from elastic_run.agent.driver.timers import TimerWatch
from elastic_run.timer.requests import FileTimerRequest
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
            cast("TimerFile", SimpleNamespace(fd=7, say=None, read=self._take)),
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
