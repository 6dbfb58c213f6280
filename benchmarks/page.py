"""docs/plots, docs/benchmarks.md and the README's block: written from what is recorded, by nothing else.

Each figure says in which plots it stands and under what heading (`Figure.plots`). A plot has a row for each contender:
its name, a mark at its value, and the value, so that no legend, and no colour, is needed to read it. Colours follow the
reader's preference of light or dark; the background is the plot's own, so that it stays legible where a page differs
from that. Same figures, same bytes: no dates, no random names.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import CONTENDERS, EVEN, HEADINGS, Figure, with_unit
from benchmarks.recording import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.recording import Record


_LOGARITHMIC = ", logarithmic; less is better"
#: By name: what the plot shows (its subject, a colon, what was measured), and what its axis measures.
PLOTS: Mapping[str, tuple[str, str]] = {
    "start": ("Start: exec to the first line of the last worker", "milliseconds" + _LOGARITHMIC),
    "first_collective": (
        "First collective: exec to the all-reduce of the last worker",
        "milliseconds; less is better",
    ),
    "detection": ("Detection: a worker's death to …", "milliseconds" + _LOGARITHMIC),
    "restart": ("Restart: a worker's death to the next round at work", "milliseconds" + _LOGARITHMIC),
    "scale": ("Rendezvous: nodes started at once to the last one in the round", "seconds" + _LOGARITHMIC),
    "tee": ("--tee: output of 2 workers to the console", "MB/s; more is better"),
    "footprint": ("Footprint: memory (PSS) of …", "megabytes" + _LOGARITHMIC),
}
#: Times better than torchrun from which a plot says so, and from which it says so without a decimal.
_NOTEWORTHY, _NO_DIGITS = 1.1, 10
#: As narrow as a phone, so that letters keep their size there; a wide screen shows the plot as it is.
_WIDTH = 480
#: Between these the axis of values runs; names stand before it, and a mark's value after the mark.
_LEFT, _RIGHT = 104, 290
_TOP, _LINE, _HEADING, _GAP = 84, 23, 26, 8
#: From here on the axis says thousands, since five ticks have little room.
_THOUSANDS = 10_000
_STYLE = """\
<style>
.paper{fill:#fff}text{fill:#1f2328;font:14px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
text{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}
.title{font-size:17px;font-weight:600}.heading{font-weight:600}.quiet{fill:#59636e}.ours{font-weight:600}
.grid{stroke:#d8dee4}.stem{stroke-width:2;opacity:.45}
.c0{fill:#0969da;stroke:#0969da}.c1{fill:#bc4c00;stroke:#bc4c00}.c2{fill:#8250df;stroke:#8250df}
.c3{fill:#6e7781;stroke:#6e7781}.c4{fill:#1a7f64;stroke:#1a7f64}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117}text{fill:#e6edf3;stroke:#0d1117}.quiet{fill:#9198a1}.grid{stroke:#30363d}
.c0{fill:#4493f8;stroke:#4493f8}.c1{fill:#f0883e;stroke:#f0883e}.c2{fill:#ab7df8;stroke:#ab7df8}
.c3{fill:#9198a1;stroke:#9198a1}.c4{fill:#3fb993;stroke:#3fb993}}
</style>"""


@dataclass(frozen=True)
class _Mark:
    """A value in a plot: whose it is, how it is written, and the number of its colour."""

    name: str
    value: float
    text: str
    colour: int
    is_ours: bool = False


def draw_all(figures: Sequence[Figure]) -> dict[str, str]:
    """Return the plots' SVG by name; a plot without figures isn't drawn."""
    found = {name: [figure for figure in figures if name in figure.plots] for name in PLOTS}
    return {name: _draw(name, some) for name, some in found.items() if some}


def _draw(name: str, figures: Sequence[Figure]) -> str:
    """Draw rows of marks: bars on a linear axis; points on a logarithmic one, which has no zero where bars begin."""
    title, axis = PLOTS[name]
    # Figures of one heading (with and without --preload) share a group, in which the other contenders stand once.
    headings: dict[str, list[Figure]] = {}
    for figure in figures:
        headings.setdefault(figure.plots[name], []).append(figure)
    groups = {heading: [*map(_our_mark, some), *_other_marks(some[0])] for heading, some in headings.items()}
    is_logarithmic = "logarithmic" in axis
    values = [mark.value for marks in groups.values() for mark in marks]
    place, ticks = _logarithmic_axis(values) if is_logarithmic else _linear_axis(values)
    rows: list[str] = []
    top = _TOP
    for heading, marks in groups.items():
        rows.append(_text(12, top + 16, heading, "heading"))
        top += _HEADING
        for mark in marks:
            rows.append(_row(mark, top + _LINE // 2, place(mark.value), is_point=is_logarithmic))
            top += _LINE
        top += _GAP
    grid = [
        f'<path class="grid" d="M{_number(place(tick))} {_TOP}V{top}"/>'
        + _text(place(tick), top + 18, _tick_text(tick), "quiet", anchor="middle")
        for tick in ticks
    ]
    height = top + 28
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    paper = f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="8"/>'
    subject, _, measured = title.partition(": ")
    words = [_text(12, 28, subject, "title"), _text(12, 49, measured, "heading"), _text(12, 69, axis, "quiet")]
    return "\n".join([head, _STYLE, paper, *words, *grid, *rows, "</svg>"]) + "\n"


def _our_mark(figure: Figure) -> _Mark:
    """Return our mark: our value, and how much better than torchrun's it is, where that can be seen."""
    text = with_unit(figure.elastic_run, figure.unit)
    if figure.torchrun and figure.elastic_run:
        times = figure.elastic_run / figure.torchrun
        times = times if figure.is_more_better else 1 / times
        if times >= _NOTEWORTHY:
            decimals = 0 if times >= _NO_DIGITS else 1
            text += f"  ({times:.{decimals}f} x {'smaller' if figure.unit == 'MB' else 'faster'})"
    is_preloaded = "--preload" in figure.name
    name, colour = ("--preload", len(CONTENDERS)) if is_preloaded else (CONTENDERS[0], 0)
    return _Mark(name, figure.elastic_run, text, colour, is_ours=True)


def _other_marks(figure: Figure) -> list[_Mark]:
    """Return a mark for each contender but us, the slowest last; a logarithm has no place for zero."""
    marks = [
        _Mark(contender, value, with_unit(value, figure.unit), colour)
        for colour, contender in enumerate(CONTENDERS)
        if colour > 0 and (value := figure.value(contender))
    ]
    return sorted(marks, key=lambda mark: mark.value, reverse=figure.is_more_better)


def _row(mark: _Mark, middle: int, end: float, *, is_point: bool) -> str:
    emphasis = "ours" if mark.is_ours else "quiet"
    name = _text(_LEFT - 10, middle + 5, mark.name, emphasis, anchor="end")
    text = _text(end + 10, middle + 5, mark.text, emphasis)
    if is_point:
        stem = f'<path class="stem c{mark.colour}" d="M{_LEFT} {middle}H{_number(end)}"/>'
        return f'{name}{stem}<circle class="c{mark.colour}" cx="{_number(end)}" cy="{middle}" r="5"/>{text}'
    width = _number(max(1.0, end - _LEFT))
    return f'{name}<rect class="c{mark.colour}" x="{_LEFT}" y="{middle - 7}" width="{width}" height="14" rx="2"/>{text}'


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_number(x)}" y="{_number(y)}" class="{kind}"{place}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _tick_text(tick: float) -> str:
    if tick >= _THOUSANDS:
        return f"{tick / 1000:,.0f} k"
    return f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"


def _linear_axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value stands, and the values to mark: from zero in two to five steps of 1, 2 or 5."""
    largest = max(values)
    power = 10 ** math.floor(math.log10(largest))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2) if largest <= 5 * factor * power)
    ticks = [step * number for number in range(math.floor(largest / step) + 1)]
    return lambda value: _LEFT + (_RIGHT - _LEFT) * value / largest, ticks


def _logarithmic_axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value stands, and the values to mark: powers of ten, from below the lowest to the highest."""
    low = math.floor(math.log10(min(values)) - 0.05)
    high = max(math.ceil(math.log10(max(values))), low + 1)
    return (
        lambda value: _LEFT + (_RIGHT - _LEFT) * (math.log10(value) - low) / (high - low),
        [10.0**power for power in range(low, high + 1)],
    )


# --- the pages: the words are in page.md, beside this file; marks like <!-- plot: start --> say what stands where -----
_WORDS = Path(__file__).parent / "page.md"
_MARK = re.compile(r"<!-- (\w+)(?:: ([\w ]+))? -->")
#: A ratio or value from which on no digit stands behind the point.
_WHOLE = 10
_TENTH_OF_A_SECOND = 100
_README_BLOCK = re.compile(r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)


def write_pages(record: Record, root: Path = ROOT) -> None:
    """Write the page, the plots, and the block between the README's benchmark markers."""
    plots = root / "docs" / "plots"
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.svg"):
        old.unlink()
    for name, svg in draw_all(record.figures).items():
        (plots / f"{name}.svg").write_text(svg, encoding="utf-8")
    (root / "docs" / "benchmarks.md").write_text(page_text(record), encoding="utf-8")
    readme, block = root / "README.md", readme_block(record)
    text = readme.read_text(encoding="utf-8")
    readme.write_text(_README_BLOCK.sub(lambda match: match[1] + block + match[2], text, count=1), encoding="utf-8")


def page_text(record: Record) -> str:
    """Return the whole page."""
    makers = {"plot": _picture, "table": _table, "verdict": _verdict, "duration": _duration, "where": _where}
    words = _WORDS.read_text(encoding="utf-8")
    text = _MARK.sub(lambda match: makers[match[1]](record, match[2] or ""), words)
    return re.sub(r"\n{3,}", "\n\n", text)


def readme_block(record: Record) -> str:
    """Return the table of the README: the figures that have a headline, as ratios."""
    release = next(iter(record.runs.values())).torch
    # What a user measures without any flag comes first, then what a flag brings, then what is only the launcher's.
    rows = sorted(
        (figure for figure in record.figures if figure.headline),
        key=lambda figure: (figure.benchmark != "warm", "--preload" in figure.headline),
    )
    lines = [f"| | elastic-run | torchrun {release.partition('+')[0]} | |", "|---|--:|--:|--:|"]
    lines += [f"| {figure.headline} | {' | '.join(_headline_cells(figure))} |" for figure in rows]
    return "\n".join(lines) + "\n"


def _headline_cells(figure: Figure) -> tuple[str, str, str]:
    ours, theirs = (_plain_value(value, figure.unit) for value in (figure.elastic_run, figure.torchrun))
    if not figure.elastic_run or not figure.torchrun:
        return ours, theirs, ""
    times = figure.torchrun / figure.elastic_run
    how = "smaller" if figure.unit == "MB" else "faster"
    return ours, theirs, f"**{times:.{0 if times >= _WHOLE else 1}f} x** {how}"


def _plain_value(value: float | None, unit: str) -> str:
    """Return a value with two or three digits that count, in seconds from 0.1 s on."""
    if value is None:
        return ""
    if unit == "ms" and value >= _TENTH_OF_A_SECOND:
        value, unit = value / 1000, "s"
    return f"{value:.2g} {unit}" if value < _WHOLE else f"{value:.0f} {unit}"


def _picture(record: Record, name: str) -> str:
    is_drawn = any(name in figure.plots for figure in record.figures)
    return f"![{PLOTS[name][0]}](plots/{name}.svg)" if is_drawn else ""


def _table(record: Record, benchmarks: str) -> str:
    """Return the figures of some benchmarks, and what is to know of them; columns without any value are left out."""
    figures = [figure for figure in record.figures if figure.benchmark in benchmarks.split()]
    rows = [figure.cells() for figure in figures]
    kept = [column for column in range(len(HEADINGS)) if any(row[column] for row in rows)]
    rule = ["---" if HEADINGS[column] in {"figure", "bar", "met"} else "--:" for column in kept]
    lines = [[HEADINGS[column] for column in kept], rule, *([row[column] for column in kept] for row in rows)]
    notes = [f"- {figure.name}: {figure.note}" for figure in figures if figure.note]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines if figures), *([""] if notes else []), *notes])


def _verdict(record: Record, _: str) -> str:
    beside = [figure for figure in record.figures if figure.torchrun is not None]
    barred = [figure for figure in record.figures if figure.bar is not None]
    worse = "; ".join(figure.name for figure in beside if figure.is_worse) or "none"
    missed = "; ".join(figure.name for figure in barred if not figure.is_met) or "none"
    return (
        f"- **{len(beside)} rows compare elastic-run with torchrun.** Rows in which torchrun is better by more than"
        f" {100 * EVEN:g} %: {worse}.\n"
        f"- **{len(barred)} rows have a bar.** Rows that missed it: {missed}."
    )


def _duration(record: Record, _: str) -> str:
    minutes = sum(run.seconds for run in record.runs.values()) / 60
    return f"The recorded runs took {minutes:.0f} min."


def _where(record: Record, _: str) -> str:
    """Return where and when all was measured, benchmarks of the same circumstances together."""
    places: dict[str, list[str]] = {}
    for name, run in record.runs.items():
        place = "{day}, {cores} cores, {memory:g} GB, {machine}; Python {python}, torch {torch}".format(**asdict(run))
        peer = f", nvidia-resiliency-ext {run.ft_launcher}" if run.ft_launcher else ""
        places.setdefault(place + peer, []).append(f"{name} ({run.busy:.0%})")
    return "\n".join(f"- {', '.join(names)}: {place}" for place, names in places.items())
