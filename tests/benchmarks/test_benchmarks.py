"""What the benchmarks make of what they measure, and the page of that; what measures is replaced, so that they end."""

from __future__ import annotations

from benchmarks import page
from benchmarks.faults import LIGHT, Case, Fault, judge
from benchmarks.figures import Bar, Comparison, Figure, compared
from benchmarks.page import draw_all
from benchmarks.recording import ROOT, read_record

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


def _figure(**described: str | Bar) -> Figure:
    fields = {"benchmark": "start", "name": "a start", "unit": "ms", **described}
    return compared(_TURNS, **fields)  # type: ignore[arg-type] # as Figure takes them


# --- what benchmarks return ------------------------------------------------------------------------------------------
def test_a_comparison_becomes_a_figure() -> None:
    """A figure has each contender's median, and the ratio of the medians with its extremes."""
    figure = _figure()
    assert (figure.elastic_run, figure.torchrun, figure.ft_launcher, figure.floor) == (20.0, 100.0, None, 5.0)
    assert figure.ratio
    assert (figure.ratio.value, figure.ratio.low, figure.ratio.high) == (0.2, 0.05, 0.3)
    assert not _figure(bar=Bar(2.5, "floor")).is_met
    assert _figure(bar=Bar(4.0, "floor")).is_met
    assert _figure(ours="warm", bar=Bar(0.01, "torchrun")).is_met


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
