"""docs/benchmarks.md, docs/plots and the README's block: written from what is recorded, by nothing else.

The words are in page.md, beside this file. What is measured stands where they say so, by marks like
``<!-- plot: start -->`` and ``<!-- table: nodes scale -->``; what nobody has measured yet leaves nothing.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import EVEN, HEADINGS, Figure
from benchmarks.plots import PLOTS, draw_all
from benchmarks.recording import ROOT

if TYPE_CHECKING:
    from benchmarks.recording import Record

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
