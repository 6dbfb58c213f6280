"""What every context of processes does, whatever starts them: here nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.functions import contexts
from elastic_run.multiprocessing.functions.contexts import PContext

if TYPE_CHECKING:
    import signal


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
