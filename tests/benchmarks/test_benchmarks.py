"""What the benchmarks make of what they measure; what measures is replaced, so that they end at once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import (
    detection,
    diagnosis,
    functions,
    memory,
    node_connections,
    nodes,
    orphans,
    scale,
    start,
    tee,
    warm,
    worker_connections,
)
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.busyness import share_between
from tests.benchmarks.diagnosis.verdict import judge
from tests.benchmarks.effort import Effort
from tests.benchmarks.installation import Installation
from tests.benchmarks.numbered_lines import Damage
from tests.benchmarks.recording import ORDER

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_EFFORT = Effort(pairs=2, starts=3, restarts=2, kills=4, megabytes=1, rounds=2, connections=3)
_INSTALLATION = Installation(Path(), "python", ("elastic-run",), ("torchrun",), ("ft_launcher",))
_FLOOD = tee.Flood(100.0, 0.5, 16.0, Damage(0, 0, 0), is_log_whole=True, lines=7)


def _one(*_: object, **__: object) -> float:
    return 1.0


def _some(_: object, *arguments: object) -> list[float]:
    return [2.0] * int(str(arguments[-1]))


def _always(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


#: What measures, and what stands in its place.
_REPLACED: dict[ModuleType, dict[str, Callable[..., object]]] = {
    start: {"start_workers": _one, "start_bare": _one},
    warm: {"train": _always(warm.Training(1.0, 2.0, 3.0, 4.0))},
    functions: {"launch_functions": _one},
    memory: {
        "watch_idle": _always(memory.Idleness(10.0, 1.0)),
        "watch_hang_detection": _one,
        "forbidden_imports": _always(set()),
    },
    detection: {"tell_after_death": _one, "end_after_death": _one, "restart_after_death": _one},
    orphans: {"seconds_to_empty": lambda _, launcher, **__: math.inf if launcher == "torchrun" else 0.5},
    worker_connections: {
        "busy_ports": nullcontext,
        "failure_of_start": _always("failed"),
        "connected_rounds": _always([True, False, True]),
    },
    nodes: {
        "start_nodes": _one,
        "start_last": _some,
        "reform_after_failure": _some,
        "tell_after_death": _some,
        "reform_after_kill": _some,
        "reform_after_term": _some,
        "replace_by_spare": _some,
    },
    node_connections: {
        "connect_after_failures": lambda _, times: iter([None] * times),
        "connect_new_nodes": lambda _, times: iter([None] * times),
        "connect_to_new_masters": lambda _, times: iter([None] * (times - 1)),
    },
    scale: {
        name: lambda size, *_, **__: scale.Round(size, 0.1, 20 * size, 5000 * size, 0.2)
        for name in ("form_round", "form_round_of_torch")
    },
    diagnosis: {
        "plant_all": lambda _, cases, **__: [
            judge(case, ["-- elastic-run: x failed --\ncause    rank 0"], 1.0) for case in cases
        ]
    },
    tee: {"flood": _always(_FLOOD), "first_line_latency": _one, "line_latency": _one},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, replaced in _REPLACED.items():
        for name, replacement in replaced.items():
            monkeypatch.setattr(module, name, replacement)


@pytest.mark.parametrize("name", ORDER)
def test_every_figure_keeps_its_raw_values(name: str) -> None:
    """Whatever a benchmark returns has the values that it was made of, for each column that isn't empty."""
    figures = BENCHMARKS[name](_INSTALLATION, _EFFORT)
    assert figures
    for figure in figures:
        assert figure.benchmark == name
        assert figure.values
        assert all(turn for turns in figure.values.values() for turn in turns), figure.name
        others = {"torchrun", "ft_launcher", "floor"}
        shown = {contender for contender in others if figure.value(contender) is not None}
        assert shown == others & set(figure.values), figure.name


def test_what_lived_on_is_a_share_and_has_no_time() -> None:
    """Kills after which something lived on count; the time to the end is that of the launcher killed alone."""
    share, time = orphans.measure(_INSTALLATION, _EFFORT)
    assert (share.elastic_run, share.torchrun) == (0.0, 100.0)
    assert share.values == {"elastic-run": [[0.0, 0.0], [0.0, 0.0]], "torchrun": [[100.0], [100.0]]}
    assert time.values == {"elastic-run": [[500.0] * 2]}


def test_failures_are_counted() -> None:
    """A figure of failures is their number, and keeps which they were."""
    starts, restarts = worker_connections.measure(_INSTALLATION, _EFFORT)
    (*_, replacements) = node_connections.measure(_INSTALLATION, _EFFORT)
    assert [figure.elastic_run for figure in (starts, restarts, replacements)] == [3.0, 1.0, 1.0]
    assert restarts.values == {"elastic-run": [[0.0, 1.0, 0.0]]}
    assert replacements.values == {"elastic-run": [[0.0, 0.0, 1.0]]}


def test_busyness_is_what_was_not_idle() -> None:
    """Of the ticks between two looks those count that were neither idle nor spent waiting for a disk."""
    before = "cpu  100 0 50 1000 10 0 5 5 9 9\ncpu0 0\n"
    after = "cpu  110 0 55 1070 15 0 5 15 99 99\ncpu0 0\n"
    assert share_between(before, after) == pytest.approx(0.25)
