"""What the benchmarks make of what they measure, and the page of that; what measures is replaced, so that they end."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import (
    detection,
    diagnosis,
    functions,
    memory,
    node_connections,
    nodes,
    orphans,
    page,
    scale,
    start,
    tee,
    warm,
    worker_connections,
)
from benchmarks.__main__ import BENCHMARKS
from benchmarks.faults import LIGHT, Case, Fault, all_cases
from benchmarks.figures import Bar, Comparison, Figure, compared
from benchmarks.installation import Effort, Installation
from benchmarks.plots import PLOTS, draw_all
from benchmarks.recording import ORDER, ROOT, Record, Run, merge, read_record, write_record
from benchmarks.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_EFFORT = Effort(pairs=2, starts=3, restarts=2, kills=4, megabytes=1, rounds=2, connections=3)
_INSTALLATION = Installation(Path(), "python", ("elastic-run",), ("torchrun",), ("ft_launcher",))
_FLOOD = tee.Flood(100.0, 0.5, 16.0, tee.Damage(0, 0, 0), is_log_whole=True, lines=7)
_RUN = Run("2026-01-31", "a processor", 2, 16, "3.11.7", "2.13.0", "0.4.1", 90, 0.03)
_TURNS = Comparison(
    {
        "elastic-run": [[10.0], [30.0], [20.0]],
        "torchrun": [[100.0], [100.0], [400.0]],
        "floor": [[5.0], [5.0], [5.0]],
        "warm": [[1.0], [1.0], [1.0]],
    }
)
_REPORT = """\
elastic-run: a worker has lost a peer
-- elastic-run: train.py failed --- exit code 1 --
cause    rank 1 on vm (local rank 1, pid 7) failed with exit code 1
         at 2026-11-24 02:05:27.024, 0.22 s after its start
         OSError: [Errno 28] No space left on
         device
others   ranks 0, 2-3 were stopped
"""
_TORCHRUN = """\
E1124 02:00 api.py:1 failed (exitcode: 1) local_rank: 1 (pid: 5) of binary: python
Failures:
[1]:
  rank      : 0 (local_rank: 0)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 5)
"""


def _figure(name: str = "a start", **described: object) -> Figure:
    fields: dict[str, object] = {"benchmark": "start", "unit": "ms", "plots": {"start": "2 workers"}, **described}
    return compared(_TURNS, name=name, **fields)  # type: ignore[arg-type] # as Figure takes them


def _record(*figures: Figure) -> Record:
    return Record({figure.benchmark: _RUN for figure in figures}, figures)


# --- what benchmarks return ------------------------------------------------------------------------------------------
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
        **dict.fromkeys(
            ("start_last", "reform_after_failure", "tell_after_death", "reform_after_kill", "reform_after_term"), _some
        ),
        "replace_by_spare": _some,
    },
    node_connections: {
        name: lambda _, times: iter([None] * (times - 1))
        for name in ("connect_after_failures", "connect_new_nodes", "connect_to_new_masters")
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


@pytest.mark.parametrize("name", ORDER)
def test_every_figure_keeps_its_raw_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a benchmark returns has the values that it was made of, for each column that isn't empty."""
    for module, replaced in _REPLACED.items():
        for function, replacement in replaced.items():
            monkeypatch.setattr(module, function, replacement)
    figures = BENCHMARKS[name](_INSTALLATION, _EFFORT)
    assert figures
    for figure in figures:
        assert figure.benchmark == name
        assert figure.values
        assert all(turn for turns in figure.values.values() for turn in turns), figure.name
        others = {"torchrun", "ft_launcher", "floor"}
        shown = {contender for contender in others if figure.value(contender) is not None}
        assert shown == others & set(figure.values), figure.name
        assert set(figure.plots) <= set(PLOTS)


def test_a_comparison_becomes_a_figure() -> None:
    """A figure has each contender's median, and the ratio of the medians with its extremes."""
    figure = _figure()
    assert (figure.elastic_run, figure.torchrun, figure.ft_launcher, figure.floor) == (20.0, 100.0, None, 5.0)
    assert figure.ratio
    assert (figure.ratio.value, figure.ratio.low, figure.ratio.high) == (0.2, 0.05, 0.3)
    assert not _figure(bar=Bar(2.5, "floor")).is_met
    assert _figure(bar=Bar(4.0, "floor")).is_met
    assert _figure(ours="warm", bar=Bar(0.01, "torchrun")).is_met


@pytest.mark.parametrize(
    ("bar", "ours", "torchrun", "is_worse"),
    [
        (None, 2.0, 1.0, True),
        (None, 101.0, 100.0, False),
        (Bar(1.0, is_least=True), 2.0, 1.0, False),
        (Bar(1.0, is_least=True), 1.0, 2.0, True),
        (None, 9.0, None, False),
    ],
)
def test_which_launcher_does_better(bar: Bar | None, ours: float, torchrun: float | None, is_worse: bool) -> None:
    """Less is better, unless the bar is one from below; what is close is even."""
    assert Figure("tee", "a figure", "s", bar, ours, {}, torchrun).is_worse is is_worse


# --- planted faults --------------------------------------------------------------------------------------------------
def test_a_report_is_right_that_names_rank_and_cause_on_every_node() -> None:
    """The first rank that each node's report names counts, and the line with which the cause is complete."""
    case = Case(Fault("disk full", r"No space left on device", LIGHT), 1, 4)
    verdict = judge(case, [_REPORT], 1.0)
    assert (verdict.has_rank, verdict.has_cause, verdict.line, verdict.is_early) == (True, True, 5, True)
    assert not judge(case, [_REPORT.replace("rank 1", "ranks 1, 3")], 1.0).has_rank
    verdict = judge(case, [_REPORT, "killed"], 1.0)
    assert (verdict.has_rank, verdict.has_cause, verdict.line) == (False, False, 0)
    verdict = judge(case, [_TORCHRUN], 1.0)
    assert (verdict.has_rank, verdict.has_cause) == (True, False)


def test_all_planted_faults_differ_and_are_enough() -> None:
    """At least 200 faults are planted, each once."""
    cases = all_cases()
    assert len(cases) == len({case.name for case in cases}) >= 200


# --- the record and its page -----------------------------------------------------------------------------------------
def test_a_partial_run_replaces_its_own_benchmarks_only(tmp_path: Path) -> None:
    """Figures of the benchmarks that ran are replaced; the others keep theirs, and their run."""
    old = _record(_figure("old start", bar=Bar(0.5, "torchrun"), note="a note"), _figure("a flood", benchmark="tee"))
    write_record(old, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == old
    run = replace(_RUN, day="2026-02-01")
    merged = merge(old, {"start": run, "warm": run}, [_figure("all-reduce", benchmark="warm"), _figure("new start")])
    assert [figure.name for figure in merged.figures] == ["new start", "all-reduce", "a flood"]
    assert merged.runs == {"start": run, "warm": run, "tee": _RUN}


def test_the_page_shows_what_is_recorded() -> None:
    """The page has a row per figure, its note, the plot, what is missed, and no column without values."""
    late = replace(_figure("late", bar=Bar(1.0)), torchrun=10.0)
    text = page.page_text(_record(_figure(bar=Bar(0.5, "torchrun"), note="quiet"), late))
    assert "| figure | bar | elastic-run | torchrun | floor | ratio | times | met |" in text
    assert "| a start | ≤ 0.5 x torchrun | 20 ms | 100 ms | 5 ms | 0.2 [0.05, 0.3] | 3 | yes |" in text
    assert "- a start: quiet" in text
    assert "Rows in which torchrun is better by more than 2 %: late." in text
    assert "Rows that missed it: late." in text
    assert text.count("![") == 1
    assert "<!--" not in text


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "cells"),
    [
        ("ms", 42.6, 1794.5, "43 ms | 1.8 s | **42 x** faster"),
        ("MB", 12.3, 224.6, "12 MB | 225 MB | **18 x** smaller"),
        ("%", 0.0, 100.0, "0 % | 100 % | "),
        ("s", 2.0, None, "2 s |  | "),
    ],
)
def test_the_readme_has_ratios(unit: str, ours: float, theirs: float | None, cells: str) -> None:
    """A row of the README says how much faster or smaller elastic-run is, where both values allow a ratio."""
    figure = Figure("start", "a name", unit, None, ours, {}, theirs, headline="a headline")
    assert page.readme_block(_record(figure)).splitlines()[-1] == f"| a headline | {cells} |"


# --- what is in the repository ---------------------------------------------------------------------------------------
def test_page_plots_and_readme_are_made_of_the_record() -> None:
    """docs/benchmarks.md, docs/plots and the README's block are what `make figures` writes, byte for byte."""
    record = read_record()
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.page_text(record)
    plots = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "plots").iterdir()}
    assert plots == draw_all(record.figures)
    assert page.readme_block(record) in (ROOT / "README.md").read_text(encoding="utf-8")


#: Figures of the design whose bounds every record must hold.
_BOUNDS = {
    "exec to the first line of the last of 2 workers": Bar(0.06, "torchrun"),
    "exec to the first line of the last of 32 workers": Bar(1.3, "floor"),
    "memory of the launcher's processes (PSS), 2 workers asleep": Bar(20.0),
    "wake-ups of the launcher's processes, 2 workers asleep": Bar(0.0),
}


def test_the_record_holds_the_bounds_of_start_and_memory() -> None:
    """Start, memory and wake-ups are recorded within the design's bounds, and torchrun is better in no row."""
    figures = read_record().figures
    assert [figure.name for figure in figures if figure.is_worse] == []
    rows = {figure.name: figure for figure in figures if figure.name in _BOUNDS}
    assert {name: row.bar for name, row in rows.items()} == _BOUNDS
    assert [name for name, row in rows.items() if not row.is_met] == []
