"""A restart waits for the GPU memory of the old workers, within bounds; the test answers in the driver's place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.driver import round_checks
from elastic_run.agent.driver.round_checks import CheckEnd, GpuMemoryWait
from tests.support.stream_bench import Clockwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.loop import Loop

_QUERY = ("/usr/bin/nvidia-smi", "--query")


class _Wait:
    """A wait for the memory of two workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = Clockwork()
        self.lines: list[str] = []
        self.ends: list[float] = []
        self.limits: list[float] = []
        self.take: Callable[[CheckEnd], None] = lambda _: None
        monkeypatch.setattr(round_checks, "CheckProcess", self._make_process)
        self.wait = GpuMemoryWait(
            cast("Loop", self.loop),
            cast("AgentContext", None),
            say=self.lines.append,
            on_end=lambda: self.ends.append(self.loop.time),
        )
        self.wait.begin(_QUERY, [70, 71])

    def _make_process(self, _loop: object, _context: object, take: Callable[[CheckEnd], None]) -> Any:
        self.take = take
        return self

    def start(self, query: tuple[str, ...], *, timeout: float) -> None:
        """Stand in for a process of the query."""
        assert query == _QUERY
        self.limits.append(timeout)


def test_the_workers_start_when_the_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says for which workers they wait; the memory of other processes does not count."""
    told = _Wait(monkeypatch)
    for output in ("70\n71\n5\n", "71\n", "5\n"):
        told.take(CheckEnd(0, is_late=False, output=output, survivors=()))
        told.loop.advance(0.1)
    assert told.lines == ["waiting until the GPU memory of the old workers (pid 70, 71) is free"]
    assert told.ends == [0.2]
    assert told.limits == pytest.approx([10.0, 9.9, 9.8])


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers start anyway."""
    told = _Wait(monkeypatch)
    told.take(CheckEnd(-9, is_late=True, output="", survivors=()))
    assert told.lines == ["nvidia-smi did not answer within 10 s; the workers start anyway"]
    assert told.ends == [0.0]


def test_memory_that_is_never_free_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the worker that holds it; the workers start anyway."""
    told = _Wait(monkeypatch)
    told.loop.time = 9.95
    told.take(CheckEnd(0, is_late=False, output="70\n", survivors=()))
    assert told.lines == [
        "GPU memory of the old worker (pid 70) is not free after 10 s; the workers start anyway",
    ]
    assert told.ends == [9.95]
