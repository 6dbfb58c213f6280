"""What every context of processes does, whatever starts them: here nothing does."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.multiprocessing.functions import contexts
from elastic_run.multiprocessing.functions.contexts import PContext, validate_full_rank
from elastic_run.multiprocessing.functions.process_group import HeldSignals
from elastic_run.multiprocessing.functions.spawn import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)
from elastic_run.multiprocessing.functions.start_processes import StartedProcess
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable


class EndlessContext(PContext):
    """Processes that never end."""

    def __init__(self) -> None:
        self.looks = 0

    def _start(self) -> None: ...

    def _poll(self) -> None:
        self.looks += 1

    def pids(self) -> dict[int, int]:
        """Return nothing."""
        return {}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None: ...


@pytest.mark.parametrize(
    ("timeout", "period", "pauses"),
    [(2.5, 1.0, [1.0, 1.0, 0.5]), (0.25, 1.0, [0.25]), (1.0, 0.5, [0.5, 0.5]), (0.0, 1.0, [])],
)
def test_a_wait_takes_its_whole_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout: float, period: float, pauses: list[float]
) -> None:
    """`wait` looks each period, and once more at the end of its timeout, before it returns nothing."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(contexts, "time", clock)
    context = EndlessContext()
    assert context.wait(timeout, period) is None
    assert slept == pauses
    assert context.looks == len(pauses) + 1


@pytest.mark.parametrize("mapping", [{}, {0: 1}, {0: 1, 2: 1}, {0: 1, 1: 1, 2: 1}])
def test_a_map_needs_exactly_the_local_ranks(mapping: dict[int, int]) -> None:
    """The message names the ranks that the map has."""
    ranks = ", ".join(map(str, mapping)) or "none"
    with pytest.raises(RuntimeError, match=f"envs must have the local ranks 0, 1, got {ranks}$"):
        validate_full_rank(mapping, 2, "envs")


def test_joined_processes_are_not_waited_for_again() -> None:
    """A program may ask again whether all have ended."""
    waits: list[float | None] = []

    def wait(is_done: Callable[[], bool], timeout: float | None) -> None:
        waits.append(timeout)
        assert is_done(), "it would wait for ever"

    group: Any = SimpleNamespace(pids={0: 70, 1: 71}, ended={0: 0, 1: 0}, wait=wait, stop=lambda *_: None)
    context = ProcessContext(group)
    assert context.join(5.0)
    assert context.join()
    assert waits == [5.0]


@pytest.mark.parametrize(
    "error",
    [
        ProcessRaisedException("it raised", 1, 71),
        ProcessExitedException("it was killed", 1, 71, -9, "SIGKILL"),
    ],
)
def test_a_failure_can_be_sent_to_another_process(error: ProcessException) -> None:
    """A program may catch it in a process of its own; it arrives with all of its attributes."""
    arrived = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)


def test_a_started_process_gets_the_signals_of_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """As subprocess.Popen has them: none once it has ended."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    group: Any = SimpleNamespace(ended={})
    process = StartedProcess(group, 0, 70, ("true",))
    process.terminate()
    process.kill()
    assert sent == [(70, signal.SIGTERM), (70, signal.SIGKILL)]
    group.ended[0] = 0
    process.terminate()
    process.kill()
    assert sent[2:] == []


def test_signals_are_held_back_in_the_main_thread() -> None:
    """And answered afterwards, by the handler of before."""
    answered: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: answered.append(number))
    held = HeldSignals((signal.SIGUSR1,))
    try:
        held.hold()
        signal.raise_signal(signal.SIGUSR1)
        assert answered == []
        held.release()
        assert answered == [signal.SIGUSR1]
    finally:
        held.give_back()
        signal.signal(signal.SIGUSR1, before)


def test_no_signals_are_held_back_in_another_thread() -> None:
    """Python allows no handler there."""
    held = HeldSignals((signal.SIGUSR1,))
    thread = threading.Thread(target=held.hold)
    thread.start()
    thread.join(DEADLINE)
    assert held.handlers == {}
