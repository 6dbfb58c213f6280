"""The loop with real processes, signals and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import loop as loop_module
from elastic_run.contract import LONGEST_TIME
from elastic_run.loop import UNKNOWN_EXIT_CODE, Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEADLINE = 20.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Give a loop, closed at the end."""
    with Loop() as opened:
        yield opened


def _run(loop: Loop, seen: list[object], count: int = 1) -> None:
    assert loop.run_until(lambda: len(seen) >= count, loop.now() + _DEADLINE), seen


def _spawn(*command: str) -> int:
    return os.posix_spawnp(command[0], command, os.environ)


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9)])
def test_exit_is_seen(
    loop: Loop,
    monkeypatch: pytest.MonkeyPatch,
    has_pidfd: bool,
    script: str,
    code: int,
) -> None:
    """A child's exit is reported once, with its code, and the child is reaped, with pidfds and without."""
    if not has_pidfd:
        monkeypatch.setattr(loop_module, "open_pidfd", lambda _: None)
    seen: list[object] = []
    pid = _spawn("sh", "-c", script)
    loop.watch_exit(pid, seen.append)
    _run(loop, seen)
    assert seen == [code]
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_child_that_somebody_else_reaped(loop: Loop) -> None:
    """When another part of the program collected the status the exit is still reported, as unknown."""
    seen: list[object] = []
    pid = _spawn("true")
    os.waitpid(pid, 0)
    loop.watch_exit(pid, seen.append)
    loop.call_soon(lambda: loop._reap(pid))
    _run(loop, seen)
    assert seen == [UNKNOWN_EXIT_CODE]


def test_timers_fire_in_order_and_can_be_cancelled(loop: Loop) -> None:
    """Calls that are due are made in the order of their times; cancelled ones are not."""
    seen: list[object] = []
    now = loop.now()
    loop.call_at(now + 0.02, lambda: seen.append("second"))
    loop.call_at(now + 0.01, lambda: seen.append("first"))
    loop.call_at(now + 0.015, lambda: seen.append("never")).cancel()
    _run(loop, seen, 2)
    assert seen == ["first", "second"]


def test_wake_up_from_another_thread(loop: Loop) -> None:
    """A thread can hand work to a loop that waits without a timeout."""
    seen: list[object] = []
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(lambda: seen.append("woken")))
    thread.start()
    loop.run_until(lambda: bool(seen))
    thread.join()
    assert seen == ["woken"]


def test_signals_reach_the_loop_and_handlers_come_back() -> None:
    """A watched signal calls back from the loop, and closing puts back what was there."""
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[object] = []
    with Loop() as loop:
        loop.watch_signals((signal.SIGUSR1,), seen.append)
        os.kill(os.getpid(), signal.SIGUSR1)
        _run(loop, seen)
    assert seen == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_ignored_signal_stays_ignored(loop: Loop) -> None:
    """A signal that was ignored when the loop came is left alone."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        loop.watch_signals((signal.SIGUSR2,), lambda _: None)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_idle_costs_no_wake_ups(loop: Loop) -> None:
    """A loop with nothing to do sleeps: one turn per event, not per interval."""
    turns = 0

    def is_done() -> bool:
        nonlocal turns
        turns += 1
        return False

    assert not loop.run_until(is_done, loop.now() + 0.3)
    assert turns <= 3


def test_descriptors_are_not_leaked() -> None:
    """A loop gives back every descriptor it took."""
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    with Loop() as loop:
        seen: list[object] = []
        loop.watch_exit(_spawn("true"), seen.append)
        loop.watch_exit(_spawn("true"), seen.append)
        _run(loop, seen, 2)
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


def test_reaping_strangers_leaves_our_children_alone(loop: Loop) -> None:
    """As PID 1 orphans are collected, and a watched child's status still arrives."""
    seen: list[object] = []
    loop.reap_strangers()
    stranger = _spawn("true")
    loop.watch_exit(_spawn("sh", "-c", "exit 4"), seen.append)
    _run(loop, seen)
    assert seen == [4]

    def is_collected() -> bool:
        try:
            return os.waitid(os.P_PID, stranger, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None and False
        except ChildProcessError:
            return True

    loop.call_later(0.0, lambda: None)
    assert loop.run_until(is_collected, loop.now() + _DEADLINE)


def test_subprocess_still_works_beside_the_loop(loop: Loop) -> None:
    """The loop waits for its own children only: those of the program around it are untouched."""
    other = subprocess.Popen(["sh", "-c", "exit 6"])
    seen: list[object] = []
    loop.watch_exit(_spawn("true"), seen.append)
    _run(loop, seen)
    assert other.wait(_DEADLINE) == 6


def _fail() -> None:
    message = "a defect"
    raise ValueError(message)


def test_an_exception_at_one_exit_loses_no_other(loop: Loop) -> None:
    """Where one SIGCHLD stands for several children, all of them are collected, and the program's handler is called."""
    seen: list[object] = []

    def fail(code: int) -> None:
        seen.append(code)
        _fail()

    previous = signal.signal(signal.SIGCHLD, lambda *_: seen.append("handler"))
    try:
        loop.keep_exits()
        pids = [_spawn("true"), _spawn("true")]
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            loop.watch_exit(pid, fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="a defect"):
                loop.run_until(lambda: False, loop.now() + _DEADLINE)
        loop._turn(0.0)
        assert sorted(map(str, set(seen))) == ["0", "handler"]
        assert seen.count(0) == 2
    finally:
        loop.close()
        signal.signal(signal.SIGCHLD, previous)


def test_the_end_of_a_child_after_the_last_turn_is_told_to_the_program() -> None:
    """A program's handler gets every SIGCHLD, also one that came when the loop did not turn any more."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGCHLD, lambda number, _: seen.append(number))
    try:
        loop = Loop()
        loop.keep_exits()
        signal.raise_signal(signal.SIGCHLD)
        assert not seen
        loop.close()
        assert seen == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_no_wake_up_is_lost(loop: Loop, quick_switches: None) -> None:
    """Of thousands that threads hand over while the loop turns, each is called once."""
    del quick_switches
    seen: list[object] = []

    def hand_over() -> None:
        for _ in range(5_000):
            loop.call_soon_threadsafe(lambda: seen.append(1))

    threads = [threading.Thread(target=hand_over) for _ in range(4)]
    for thread in threads:
        thread.start()
    _run(loop, seen, 20_000)
    for thread in threads:
        thread.join()
    loop._turn(0.0)
    assert len(seen) == 20_000


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let Python change between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_timer_beyond_the_kernel_s_range() -> None:
    """A loop that waits for a time in years makes its other calls meanwhile."""
    with Loop() as loop:
        never: list[int] = []
        loop.call_later(LONGEST_TIME, lambda: never.append(1))
        seen: list[int] = []
        assert loop._timeout(loop.now(), None) == pytest.approx(86400.0)
        loop.call_later(0.0, lambda: seen.append(1))
        assert loop.run_until(lambda: bool(seen), loop.now() + 20)
        assert not never
