"""What every context of processes does, whatever starts them: here nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.multiprocessing.functions import contexts
from elastic_run.multiprocessing.functions.contexts import PContext, validate_full_rank
from elastic_run.multiprocessing.functions.spawn import ProcessContext

if TYPE_CHECKING:
    import signal
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
    """The message says which ranks it has."""
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
