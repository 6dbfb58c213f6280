"""The workers' timers in the agent's loop: whose timers count, and until when."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elastic_run.agent.driver.timers import TimerWatch, WorkerTimers, timer_exception
from elastic_run.agent.removal_watch import RemovalWatch
from elastic_run.contract import TIMER_EXPIRED
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.loop import Loop
from elastic_run.timer import FileTimerClient, expiries
from elastic_run.timer.requests import FileTimerRequest
from elastic_run.timer.timer_file import TimerFile, has_reader
from tests.support.stream_bench import Clockwork
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.mark.parametrize("has_place", [True, False])
def test_a_pipe_that_was_removed_is_made_again(tmp_path: Path, *, has_place: bool) -> None:
    """With its directory; if that can't be done, a line says so. Timers that run go on."""
    directory = tmp_path / "above" / "timers"
    directory.mkdir(parents=True)
    lines: list[str] = []
    expired: set[str] = set()

    def note(name: str, request: FileTimerRequest | None) -> None:
        if name == "timer expired" and request is not None:
            expired.add(request.scope_id)

    with Loop() as loop:
        timers = WorkerTimers(str(directory), {})
        watch = TimerWatch(loop, timers.file, ranks=lambda: {os.getpid(): 0}, say=lines.append, on_event=note)
        client = FileTimerClient(timers.file.path, signal=0)
        client.acquire("before", time.time() + 0.4)
        wanted = {"before"}
        shutil.rmtree(directory if has_place else directory.parent)
        if has_place:
            assert loop.run_until(lambda: has_reader(timers.file.path), loop.now() + DEADLINE)
            client.acquire("after", time.time() + 0.1)
            wanted.add("after")
        assert loop.run_until(lambda: expired == wanted, loop.now() + DEADLINE)
        wait_limit = 0.0 if has_place else DEADLINE
        told = loop.run_until(lambda: any("made again" in line for line in lines), loop.now() + wait_limit)
        watch.close()
    timers.close()
    assert not directory.exists()
    assert told != has_place


def test_a_watch_that_wakes_up_without_an_event_goes_on(tmp_path: Path) -> None:
    """In one turn of the loop, a descriptor with an event is closed, and the watch that is opened gets its number."""
    path, removed = tmp_path / "file", []
    path.touch()
    with Loop() as loop:
        watch = RemovalWatch(loop, str(path), lambda: removed.append(path))
        watch._read()
        path.unlink()
        assert loop.run_until(lambda: bool(removed), loop.now() + DEADLINE)
        watch.close()


def test_a_pipe_named_without_a_directory_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHELASTIC_TIMER_FILE may name it so."""
    monkeypatch.chdir(tmp_path)
    file = TimerFile("timers", pytest.fail)
    Path("timers").unlink()
    file.make_again()
    assert has_reader("timers")
    file.close()


def test_a_pipe_is_not_made_again_in_a_directory_of_another_process(tmp_path: Path) -> None:
    """In /tmp that directory may be another user's, who could then tell the agent of timers."""
    directory, other = tmp_path / "timers", tmp_path / "other"
    directory.mkdir()
    other.mkdir()
    file = TimerFile(str(directory / "pipe"), pytest.fail)
    shutil.rmtree(directory)
    other.rename(directory)
    with pytest.raises(FileExistsError):
        file.make_again()
    assert not [*directory.iterdir()]
    file.close()


def test_a_worker_that_no_timer_has_ended_has_its_own_exception() -> None:
    """One that a timer has ended has the timer, once, with the lines of its exception."""
    said = ExceptionText("ValueError", "no", ("a line",), "train.py:3 in main")
    assert timer_exception(4711, said) is said
    expiries.note(4711, "scope 'a' expired after 3 s")
    told = timer_exception(4711, said)
    assert told == ExceptionText(TIMER_EXPIRED, "scope 'a' expired after 3 s", ("a line",), "train.py:3 in main")
    assert timer_exception(4711, None) is None
