"""Figures, what is recorded of them, and the page, plots and README block that are made of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.benchmarks import page
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.drawing import Curve, Group, Mark, draw_curves, draw_groups
from tests.benchmarks.figures import Bar, Figure, compared, from_json, to_json
from tests.benchmarks.plots import PLOTS, draw_all
from tests.benchmarks.recording import ORDER, ROOT, Record, Run, merge, read_record, write_record

if TYPE_CHECKING:
    from pathlib import Path

_RUN = Run("2026-01-31", "a processor", 2, 16, "3.11.7", "2.13.0", "0.4.1", 90, 0.03)
_TURNS = Comparison(
    {
        "elastic-run": [[10.0], [30.0], [20.0]],
        "torchrun": [[100.0], [100.0], [400.0]],
        "floor": [[5.0], [5.0], [5.0]],
        "warm": [[1.0], [1.0], [1.0]],
    }
)


def _figure(name: str = "a start", **described: object) -> Figure:
    fields: dict[str, object] = {"benchmark": "start", "unit": "ms", "plots": {"start": "2 workers"}, **described}
    return compared(_TURNS, name=name, **fields)  # type: ignore[arg-type] # as Figure takes them


def _record(*figures: Figure) -> Record:
    return Record({figure.benchmark: _RUN for figure in figures}, figures)


# --- figures ---------------------------------------------------------------------------------------------------------
def test_a_comparison_becomes_a_figure() -> None:
    """A figure has each contender's median, the ratio of the medians with its extremes, and the raw values."""
    figure = _figure()
    assert (figure.elastic_run, figure.torchrun, figure.ft_launcher, figure.floor) == (20.0, 100.0, None, 5.0)
    assert figure.ratio
    assert (figure.ratio.value, figure.ratio.low, figure.ratio.high) == (0.2, 0.05, 0.3)
    assert figure.values["torchrun"] == [[100.0], [100.0], [400.0]]
    assert set(figure.values) == {"elastic-run", "torchrun", "floor"}


def test_the_bar_says_what_a_ratio_is_of() -> None:
    """The ratio is to what the bar names, and decides whether the bar is met."""
    assert not _figure(bar=Bar(2.5, "floor")).is_met
    assert _figure(bar=Bar(4.0, "floor")).is_met
    assert _figure(bar=Bar(0.2, "torchrun")).is_met
    assert _figure(bar=Bar(20.0)).is_met


def test_another_contender_may_stand_in_our_column() -> None:
    """With preloaded workers, say, it is their median that is shown and compared."""
    figure = _figure(ours="warm", bar=Bar(0.01, "torchrun"))
    assert figure.elastic_run == 1.0
    assert figure.is_met
    assert "elastic-run" not in figure.values


@pytest.mark.parametrize(
    ("bar", "ours", "torchrun", "is_worse"),
    [
        (None, 1.0, 2.0, False),
        (None, 2.0, 1.0, True),
        (None, 101.0, 100.0, False),
        (Bar(1.0, is_least=True), 2.0, 1.0, False),
        (Bar(1.0, is_least=True), 1.0, 2.0, True),
        (Bar(1.0, is_least=True), 100.0, 101.0, False),
        (None, 9.0, None, False),
    ],
)
def test_who_does_better(bar: Bar | None, ours: float, torchrun: float | None, is_worse: bool) -> None:
    """Less is better, unless the bar is one from below; what is close is even, and alone nobody does better."""
    assert Figure("tee", "a figure", "s", bar, ours, {}, torchrun).is_worse is is_worse


# --- what is recorded ------------------------------------------------------------------------------------------------
def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    """A record comes back from its file as it was, raw values included."""
    record = _record(_figure(bar=Bar(0.5, "torchrun"), note="a note"), _figure("another"))
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record
    assert all(from_json(to_json(figure)) == figure for figure in record.figures)


def test_no_file_is_an_empty_record(tmp_path: Path) -> None:
    """The first run ever has nothing to merge with."""
    assert read_record(tmp_path / "none.json") == Record({}, ())


def test_a_partial_run_replaces_its_own_benchmarks_only() -> None:
    """Figures of the benchmarks that ran are replaced, gone ones removed; the others keep theirs, and their run."""
    old = _record(_figure("old start"), _figure("gone"), _figure("a flood", benchmark="tee"))
    run = replace(_RUN, day="2026-02-01")
    merged = merge(old, {"start": run, "warm": run}, [_figure("all-reduce", benchmark="warm"), _figure("new start")])
    assert [figure.name for figure in merged.figures] == ["new start", "all-reduce", "a flood"]
    assert merged.runs == {"start": run, "warm": run, "tee": _RUN}
    assert list(merged.runs) == sorted(merged.runs, key=ORDER.index)


# --- the page --------------------------------------------------------------------------------------------------------
def test_the_page_shows_what_is_recorded() -> None:
    """The page has a row per figure, its note, the plot, where it was measured, and no column without values."""
    text = page.page_text(_record(_figure(bar=Bar(0.5, "torchrun"), note="quiet")))
    assert "| figure | bar | elastic-run | torchrun | floor | ratio | times | met |" in text
    assert "| a start | ≤ 0.5 x torchrun | 20 ms | 100 ms | 5 ms | 0.2 [0.05, 0.3] | 3 | yes |" in text
    assert "- a start: quiet" in text
    assert "(plots/start.svg)" in text
    assert "- start (3%): 2026-01-31, 2 cores, 16 GB, a processor; Python 3.11.7, torch 2.13.0, nvidia-resil" in text
    assert "The recorded runs took 2 min." in text


def test_what_was_measured_once_has_no_spread() -> None:
    """A single turn has a ratio without extremes; how often each was measured is said, in the columns' order."""
    turn = Comparison({"torchrun": [[100.0]], "elastic-run": [[10.0, 20.0, 30.0]]})
    text = page.page_text(_record(compared(turn, benchmark="start", name="once", unit="ms")))
    assert "| once | 20 ms | 100 ms | 0.2 | 3, 1 |" in text


def test_a_recording_of_before_still_becomes_a_page(tmp_path: Path) -> None:
    """A recording that has a load average, and figures without raw values, is shown without either."""
    write_record(_record(replace(_figure(), values={})), tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text(encoding="utf-8").replace('"busy": 0.03', '"load": 14.9')
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    shown = page.page_text(read_record(tmp_path / "record.json"))
    assert "| figure | elastic-run | torchrun | floor | ratio |" in shown
    assert "- start: 2026-01-31" in shown
    assert "14.9" not in shown


def test_the_page_names_what_is_missed() -> None:
    """Bars that are missed and rows in which torchrun does better are named at the top."""
    better = replace(_figure("slow"), elastic_run=103.0, bar=None)
    text = page.page_text(_record(_figure("late", bar=Bar(1.0)), better))
    assert "2 rows compare elastic-run with torchrun.** Rows in which torchrun is better by more than 2 %: slow" in text
    assert "- **1 rows have a bar.** Rows that missed it: late.\n" in text


def test_what_is_not_measured_leaves_nothing() -> None:
    """Of benchmarks that nobody ran the page has neither table nor plot."""
    text = page.page_text(_record(_figure()))
    assert text.count("| figure |") == 1
    assert text.count("![") == 1
    assert "<!--" not in text
    assert "\n\n\n" not in text


def test_pages_are_written_anew(tmp_path: Path) -> None:
    """Page and plots are written, a plot that nothing stands in is removed, and so the README's block is replaced."""
    (tmp_path / "docs" / "plots").mkdir(parents=True)
    (tmp_path / "docs" / "plots" / "old.svg").write_text("old", encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nbelow\n", encoding="utf-8")
    record = _record(_figure(headline="a plain start"), _figure("detail"))
    page.write_page(record, tmp_path)
    assert page.write_readme(record, tmp_path)
    assert (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.page_text(record)
    assert [path.name for path in (tmp_path / "docs" / "plots").iterdir()] == ["start.svg"]
    head = "| | elastic-run | torchrun 2.13.0 | |\n|---|--:|--:|--:|\n"
    table = f"{head}| a plain start | 20 ms | 0.1 s | **5.0 x** faster |\n"
    expected = f"above\n<!-- benchmarks -->\n{table}<!-- /benchmarks -->\nbelow\n"
    assert readme.read_text(encoding="utf-8") == expected


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


def test_a_readme_without_a_block_is_told(tmp_path: Path) -> None:
    """Who calls is told that there is no place for the figures, and the file stays as it is."""
    (tmp_path / "README.md").write_text("words\n", encoding="utf-8")
    assert not page.write_readme(_record(_figure()), tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "words\n"


# --- plots -----------------------------------------------------------------------------------------------------------
def _words(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]  # noqa: S314


def test_a_plot_of_contenders() -> None:
    """A plot has its title, a heading per figure, and each contender with its value; ours says how much better."""
    words = _words(draw_all([_figure()])["start"])
    assert {"2 workers", "elastic-run", "torchrun", "floor", "100 ms", "5 ms", "20 ms  (5.0 x faster)"} <= set(words)
    assert words[:3] == [*PLOTS["start"].title.split(": "), PLOTS["start"].axis]


def test_cold_and_warm_share_a_group() -> None:
    """Where our value stands beside that with preloaded workers, the others are drawn once."""
    plots = {"first_collective": "8 workers"}
    figures = [_figure("launch", plots=plots), _figure("launch, --preload torch", ours="warm", plots=plots)]
    words = _words(draw_all(figures)["first_collective"])
    names = ("8 workers", "torchrun", "floor", "elastic-run", "--preload")
    assert [words.count(name) for name in names] == [1] * len(names)


def test_a_plot_of_shares() -> None:
    """Cold and warm stand under one heading, as shares of torchrun's value."""
    figures = [
        _figure(plots={"warm": "launch"}),
        _figure("launch, --preload torch", ours="warm", plots={"warm": "launch"}),
    ]
    words = _words(draw_all(figures)["warm"])
    assert words.count("launch") == 1
    assert {"20 %  (20 ms)", "1 %  (1 ms)", "100 %"} <= set(words)


def test_a_plot_of_sizes() -> None:
    """Along sizes each contender has a curve, with its values."""
    figures = [
        Figure("scale", f"{size} nodes", "s", None, size / 1000, {}, torchrun, plots={"scale": str(size)})
        for size, torchrun in ((64, 12.0), (1000, None))
    ]
    words = _words(draw_all(figures)["scale"])
    assert {"64", "1,000", "nodes", "0.064 s", "1 s", "12 s", "elastic-run", "torchrun"} <= set(words)


@pytest.mark.parametrize("is_logarithmic", [True, False])
def test_marks_stand_in_the_order_of_their_values(is_logarithmic: bool) -> None:
    """A larger value stands further right, and all stay within the picture, over six powers of ten."""
    values = [0.02, 0.5, 7.0, 300.0, 20000.0]
    marks = [Mark("a", value, f"{value:g} ms", 0) for value in values]
    svg = draw_groups("title", "axis", [Group("heading", marks)], is_logarithmic=is_logarithmic)
    pattern = r'<circle class="c0" cx="([\d.]+)"' if is_logarithmic else r'<rect class="c0" .*?width="([\d.]+)"'
    places = [float(place) for place in re.findall(pattern, svg)]
    assert places == sorted(places)
    assert len(places) == len(values)
    assert all(0 < place <= 560 for place in places)


def test_what_grows_with_the_size_is_a_straight_line() -> None:
    """On logarithmic axes a curve of equal growth is straight."""
    svg = draw_curves("title", "s", "nodes", [Curve("a", [(10.0, 1.0, ""), (100.0, 10.0, ""), (1000.0, 100.0, "")], 0)])
    (first, middle, last) = re.findall(r'<circle class="c0" cx="([\d.]+)" cy="([\d.]+)"', svg)
    for axis in (0, 1):
        assert float(middle[axis]) == pytest.approx((float(first[axis]) + float(last[axis])) / 2, abs=0.2)


def test_text_is_escaped_and_in_both_colour_schemes() -> None:
    """What has a meaning in XML is no danger, and whatever has a colour by day has one by night."""
    svg = draw_groups("<&>", "axis", [Group("a & b", [Mark("<c>", 1.0, "1", 4)])], is_logarithmic=True)
    assert {"<&>", "a & b", "<c>"} <= set(_words(svg))
    day, night = svg.partition("</style>")[0].split("@media (prefers-color-scheme:dark)")
    coloured = set(re.findall(r"\.(c\d|paper|quiet|grid)\{(?:fill|stroke):#", day))
    assert coloured == {"c0", "c1", "c2", "c3", "c4", "paper", "quiet", "grid"}
    assert coloured == set(re.findall(r"\.(c\d|paper|quiet|grid)\{(?:fill|stroke):#", night))


# --- what is in the repository ---------------------------------------------------------------------------------------
def test_page_plots_and_readme_are_made_of_the_record() -> None:
    """docs/benchmarks.md, docs/plots and the README's block are what `make figures` writes, byte for byte."""
    record = read_record()
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.page_text(record)
    plots = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "plots").iterdir()}
    assert plots == draw_all(record.figures)
    assert page.readme_block(record) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_recorded_plot_is_drawn() -> None:
    """No figure says that it stands in a plot that isn't there."""
    assert {name for figure in read_record().figures for name in figure.plots} <= set(PLOTS)


def test_torchrun_is_better_in_no_recorded_row() -> None:
    """In none of the recorded rows elastic-run is the slower or the larger one."""
    assert [figure.name for figure in read_record().figures if figure.is_worse] == []


#: Figures of the design whose bounds every record must hold.
_BOUNDS = {
    "exec to the first line of the last of 2 workers": Bar(0.06, "torchrun"),
    "exec to the first line of the last of 32 workers": Bar(1.3, "floor"),
    "memory of the launcher's processes (PSS), 2 workers asleep": Bar(20.0),
    "wake-ups of the launcher's processes, 2 workers asleep": Bar(0.0),
}


def test_the_record_holds_the_bounds_of_start_and_memory() -> None:
    """Start, memory and wake-ups are recorded within the design's bounds, and these are the bars of their rows."""
    rows = {figure.name: figure for figure in read_record().figures if figure.name in _BOUNDS}
    assert {name: row.bar for name, row in rows.items()} == _BOUNDS
    assert [name for name, row in rows.items() if not row.is_met] == []
