"""The watch for workers in uninterruptible sleep: when it speaks, and when it looks no more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

from elastic_run.agent.driver.d_state import DStateWatch
from elastic_run.loop import Loop

if TYPE_CHECKING:
    import pytest

_TIMEOUT = 0.2


def set_states(monkeypatch: pytest.MonkeyPatch, *states: str) -> None:
    """Let a process have one state after another, and the last one from then on."""
    left = [*states]
    monkeypatch.setattr(psutil.Process, "status", lambda _: left.pop(0) if len(left) > 1 else left[0])


def watch_own_process(seconds: float, *, is_closed: bool = False) -> tuple[list[int], int]:
    """Watch this process; return the pids of which the watch has told, and how often it has looked."""
    told, looks = list[int](), list[int]()

    def pids() -> list[int]:
        looks.append(1)
        return [os.getpid()]

    with Loop() as loop:
        watch = DStateWatch(loop, _TIMEOUT, pids=pids, on_stuck=told.append)
        if is_closed:
            watch.close()
        loop.run_until(lambda: False, loop.now() + seconds)
    return told, len(looks)


def test_a_process_that_stays_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the whole timeout, which has several looks."""
    set_states(monkeypatch, psutil.STATUS_DISK_SLEEP)
    told, looks = watch_own_process(3 * _TIMEOUT)
    assert told == [os.getpid()]
    assert looks >= 2


def test_a_process_that_wakes_between_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal disk traffic is many short sleeps."""
    set_states(monkeypatch, *[psutil.STATUS_DISK_SLEEP, psutil.STATUS_RUNNING] * 4, psutil.STATUS_SLEEPING)
    assert watch_own_process(3 * _TIMEOUT)[0] == []


def test_a_watch_that_was_closed_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a round that is over may have other owners by then."""
    set_states(monkeypatch, psutil.STATUS_DISK_SLEEP)
    assert watch_own_process(2 * _TIMEOUT, is_closed=True) == ([], 1)
