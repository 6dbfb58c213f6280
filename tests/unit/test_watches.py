"""The watches over a round: which of them begin, and when they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.driver import d_state
from elastic_run.agent.driver.watches import Watches
from elastic_run.core.agent.config import AgentConfig
from elastic_run.core.diagnosis.hang import NO_DETECTION, NOT_YET
from elastic_run.core.protocol.node_status import HANG, is_sound
from tests.support.stream_bench import Clockwork

if TYPE_CHECKING:
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.loop import Loop


_SILENT = SimpleNamespace(activities={})


def make_round(alive: set[int]) -> Round:
    """Make a round of which some workers run."""
    return cast("Round", SimpleNamespace(number=4, workers=SimpleNamespace(alive=alive, pids={}), output=_SILENT))


ROUND = make_round(set())


def make_watches(**options: Any) -> Watches:
    """Make the watches of an agent without a job of several nodes."""
    chosen = SimpleNamespace(**{"stuck_timeout": 0.0, "agent_config": AgentConfig(), **options})
    return Watches(
        cast("Loop", Clockwork()),
        cast("AgentContext", SimpleNamespace(options=chosen, timers=None)),
        is_polled=False,
        say=lambda _: None,
        on_stuck=lambda _: None,
        on_failed=lambda *_: None,
        on_hang=lambda *_: None,
        on_waiting_nodes=lambda _: None,
        read_resources=None,
        on_timer=lambda *_: None,
    )


@pytest.mark.parametrize(("timeout", "told"), [(None, NO_DETECTION), (60.0, NOT_YET)])
def test_a_node_that_does_not_look_for_hangs_yet_says_so(timeout: float | None, told: float) -> None:
    """Other nodes tell a node without --hang-timeout from one that has not looked yet."""
    watches = make_watches(agent_config=AgentConfig(hang_timeout=timeout))
    assert watches.describe_hang() == {"round": -1, "timeout": told, "age": 0.0, "workers": []}
    watches.begin(make_round({0}))
    answer = watches.describe_hang()
    assert answer == {"round": 4, "timeout": told, "age": 0.0, "workers": []}
    assert is_sound({"host": "node8", "pid": 1, "round_id": "4/1/a", "round_nodes": 2, **answer}, HANG)


def test_a_node_whose_workers_have_ended_at_once_hides_no_hang() -> None:
    """They have ended before the node has looked for hangs: other ranks may wait for them."""
    watches = make_watches(agent_config=AgentConfig(hang_timeout=60.0))
    watches.begin(ROUND)
    assert watches.describe_hang() == {"round": 4, "timeout": 60.0, "age": 0.0, "workers": []}


@pytest.mark.parametrize(("timeout", "begun"), [(0.0, []), (0.5, [0.5])])
def test_state_d_is_watched_where_it_has_a_timeout(
    timeout: float, begun: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any length above 0; the watch ends with the round."""
    found: list[float] = []
    ended: list[bool] = []

    def watch(_loop: object, seconds: float, **_: object) -> SimpleNamespace:
        found.append(seconds)
        return SimpleNamespace(close=lambda: ended.append(True))

    monkeypatch.setattr(d_state, "DStateWatch", watch)
    watches = make_watches(stuck_timeout=timeout)
    watches.begin(ROUND)
    assert found == begun
    assert ended == []
    watches.end_round()
    assert ended == [True] * len(begun)
