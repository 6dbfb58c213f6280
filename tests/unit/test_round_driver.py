"""The driver of an agent's rounds: what it tells, and in which order; no worker is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver.round import Round
from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.core.agent import machine, messages
from elastic_run.core.failure import root_cause
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
        self.context: Any = SimpleNamespace(
            options=SimpleNamespace(is_whole_process=False),
            worker_pool=None,
            adopt_orphans=lambda: True,
        )
        history = SimpleNamespace(
            add_round=lambda *_: failure,
            tell_folded=lambda _: None,
            ends=(),
            root=None,
            begin=lambda: self.calls.append(("history begins",)),
        )
        parts: Any = SimpleNamespace(
            context=self.context,
            loop=self.loop,
            observation=SimpleNamespace(
                record=lambda _: None, begin=lambda: self.calls.append(("observation begins",))
            ),
            feed=self.fed.append,
            agent=SimpleNamespace(state=machine.RUNNING, stop_reason=stop_reason),
            current=SimpleNamespace(number=3),
            history=history,
        )
        background: Any = None
        self.driver = RoundDriver(
            parts,
            None,
            background=background,
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
    assert made.driver.failure is failure


@pytest.mark.parametrize(("exitcode", "looks"), [(1, [False]), (-6, [False]), (-9, [])])
def test_a_lost_peer_is_looked_for_quickly(exitcode: int, looks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers wait for the answer, so a large log file is not searched; a killed worker has lost no peer."""
    found: list[bool] = []

    def end_of(_: object, *, is_thorough: bool = True) -> bool:
        found.append(is_thorough)
        return True

    monkeypatch.setattr(root_cause, "has_lost_rank", bool)
    current: Any = SimpleNamespace(
        _exits={0: SimpleNamespace(exitcode=exitcode)},
        output=SimpleNamespace(catch_up=lambda _: None),
        _make_end=end_of,
    )
    assert Round.is_secondary(current, 0) is bool(looks)
    assert found == looks
