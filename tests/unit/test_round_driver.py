"""The driver of an agent's rounds: what it tells, and in which order; no worker is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.core.agent import machine, messages
from elastic_run.core.job.restart_policy import Failure
from tests.support.stream_bench import Clockwork


class _Driver:
    """A driver, and what it has told."""

    def __init__(self, *, stop_reason: str = "", failure: Failure | None = None) -> None:
        loop: Any = Clockwork()
        loop.reap_strangers = lambda **options: self.calls.append(("reap", options))
        self.loop = loop
        self.calls: list[tuple[Any, ...]] = []
        self.fed: list[object] = []
        context: Any = SimpleNamespace(
            options=SimpleNamespace(is_whole_process=False),
            worker_pool=None,
            adopt_orphans=lambda: True,
            loop=loop,
            feed=self.fed.append,
            agent=SimpleNamespace(state=machine.RUNNING, stop_reason=stop_reason),
        )
        history = SimpleNamespace(add_round=lambda *_: failure, tell_folded=lambda _: None, ends=(), root=None)
        parts: Any = SimpleNamespace(
            context=context,
            events=SimpleNamespace(round_gone=lambda *_: None),
            current=SimpleNamespace(number=3),
            history=history,
        )
        nothing: Any = None
        self.driver = RoundDriver(
            parts,
            nothing,
            None,
            background=nothing,
            on_step=lambda step, duration: self.calls.append((step, duration)),
            on_timer=lambda *_: None,
        )


@pytest.mark.parametrize(
    ("stop_reason", "failure", "told"),
    [
        (machine.AFTER_FAILURE, Failure(7), [("FAILED", 0.0), ("STOP", 2500.0)]),
        (machine.AFTER_HALT, None, [("STOP", 2500.0)]),
        (machine.AFTER_SUCCESS, None, []),
    ],
)
def test_the_end_of_a_round_is_told_in_steps(
    stop_reason: str, failure: Failure | None, told: list[tuple[str, float]]
) -> None:
    """A failure, then the stop with its milliseconds; a round that has succeeded was not stopped."""
    made = _Driver(stop_reason=stop_reason, failure=failure)
    made.driver._stopped_at = 1.0
    made.loop.time = 3.5
    made.driver._on_gone([])
    assert made.calls == told
    assert made.fed == [messages.GroupGone(3, failure=failure, is_unkillable=False)]
    assert made.driver._failure is failure
