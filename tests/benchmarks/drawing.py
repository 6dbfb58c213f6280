"""Charts as SVG, in plain text: marks at values, in rows under headings, or along sizes.

Every mark has its value beside it and its name before it, so that no legend, and no colour, is needed to read a chart.
Colours follow the reader's preference of light or dark; the background is the chart's own, so that it stays legible
where a page differs from that. Same data, same bytes: no dates, no random names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: As narrow as a phone, so that letters keep their size there; a wide screen shows the chart as it is.
_WIDTH = 480
#: Between these the axis of values runs; names stand before it, and a mark's value after the mark.
_LEFT, _RIGHT = 104, 290
_TOP, _LINE, _HEADING, _GAP = 84, 23, 26, 8
_MARK = 5
#: From here on the axis says thousands, since five ticks have little room.
_THOUSANDS = 10_000
#: Colours of our own marks, whose names and values stand out.
_OURS = (0, 4)
_STYLE = """\
<style>
.paper{fill:#fff}text{fill:#1f2328;font:14px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
text{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}
.title{font-size:17px;font-weight:600}.heading{font-weight:600}.quiet{fill:#59636e}.ours{font-weight:600}
.grid{stroke:#d8dee4}.stem{stroke-width:2;opacity:.45}.curve{fill:none;stroke-width:2.5}
.c0{fill:#0969da;stroke:#0969da}.c1{fill:#bc4c00;stroke:#bc4c00}.c2{fill:#8250df;stroke:#8250df}
.c3{fill:#6e7781;stroke:#6e7781}.c4{fill:#1a7f64;stroke:#1a7f64}
.curve.c0,.curve.c1,.curve.c2,.curve.c3,.curve.c4{fill:none}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117}text{fill:#e6edf3;stroke:#0d1117}.quiet{fill:#9198a1}.grid{stroke:#30363d}
.c0{fill:#4493f8;stroke:#4493f8}.c1{fill:#f0883e;stroke:#f0883e}.c2{fill:#ab7df8;stroke:#ab7df8}
.c3{fill:#9198a1;stroke:#9198a1}.c4{fill:#3fb993;stroke:#3fb993}}
</style>"""


@dataclass(frozen=True)
class Mark:
    """A value in a chart.

    Args:
        name: Whose it is.
        value: It.
        text: How it is written beside the mark.
        colour: 0 to 4; ours are 0 and 4.
    """

    name: str
    value: float
    text: str
    colour: int


@dataclass(frozen=True)
class Group:
    """Marks under a heading.

    Args:
        heading: What was measured; empty for a group without one.
        marks: From top to bottom.
    """

    heading: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Curve:
    """Values along sizes.

    Args:
        name: Whose they are.
        points: Size, value and how the value is written.
        colour: 0 to 4; ours are 0 and 4.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int


def draw_groups(title: str, axis: str, groups: Sequence[Group], *, is_logarithmic: bool) -> str:
    """Draw rows of marks: bars on a linear axis; points on a logarithmic one, which has no zero for bars to begin at.

    Args:
        title: What the chart shows: its subject, a colon, and what was measured.
        axis: What the axis measures.
        groups: From top to bottom.
        is_logarithmic: Which axis.

    Returns:
        The whole file.
    """
    values = [mark.value for group in groups for mark in group.marks]
    place, ticks = (_logarithmic if is_logarithmic else _linear)(values, _LEFT, _RIGHT)
    rows: list[str] = []
    top = _TOP
    for group in groups:
        if group.heading:
            rows.append(_text(12, top + 16, group.heading, "heading"))
            top += _HEADING
        for mark in group.marks:
            rows.append(_row(mark, top + _LINE // 2, place(mark.value), is_point=is_logarithmic))
            top += _LINE
        top += _GAP
    grid = [_upright(place(tick), top, _tick_text(tick)) for tick in ticks]
    return _file(title, axis, top + 28, [*grid, *rows])


def draw_curves(title: str, axis: str, across: str, curves: Sequence[Curve]) -> str:
    """Draw values along sizes, both axes logarithmic: what grows with the size is a straight line.

    Args:
        title: What the chart shows: its subject, a colon, and what was measured.
        axis: What the upright axis measures.
        across: What the other one measures.
        curves: What to draw.

    Returns:
        The whole file.
    """
    bottom, left, right = 400, 62, 372
    sizes = sorted({size for curve in curves for size, _, _ in curve.points})
    along, _ = _logarithmic(sizes, left + 42, right, is_tight=True)
    up, ticks = _logarithmic([value for curve in curves for _, value, _ in curve.points], bottom, _TOP + 20)
    parts = [
        f'<path class="grid" d="M{left} {_number(up(tick))}H{right + 14}"/>'
        + _text(left - 8, up(tick) + 4, _tick_text(tick), "quiet", anchor="end")
        for tick in ticks
    ]
    parts += [_text(along(size), bottom + 22, f"{size:,.0f}", "quiet", anchor="middle") for size in sizes]
    parts.append(_text((left + right) / 2, bottom + 42, across, "quiet", anchor="middle"))
    for curve in curves:
        places = [(along(size), up(value), text) for size, value, text in curve.points]
        line = "L".join(f"{_number(x)} {_number(y)}" for x, y, _ in places)
        parts.append(f'<path class="curve c{curve.colour}" d="M{line}"/>')
        parts += [_point(x, y, curve.colour) + _text(x - 6, y - 11, text, anchor="end") for x, y, text in places]
        parts.append(_text(places[-1][0] + 14, places[-1][1] + 5, curve.name, _emphasis(curve.colour)))
    return _file(title, axis, bottom + 58, parts)


def _file(title: str, axis: str, height: int, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    paper = f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="8"/>'
    subject, _, measured = title.partition(": ")
    words = [_text(12, 28, subject, "title"), _text(12, 49, measured, "heading"), _text(12, 69, axis, "quiet")]
    return "\n".join([head, _STYLE, paper, *words, *parts, "</svg>"]) + "\n"


def _row(mark: Mark, middle: int, end: float, *, is_point: bool) -> str:
    name = _text(_LEFT - 10, middle + 5, mark.name, _emphasis(mark.colour), anchor="end")
    text = _text(end + 10, middle + 5, mark.text, _emphasis(mark.colour))
    if is_point:
        stem = f'<path class="stem c{mark.colour}" d="M{_LEFT} {middle}H{_number(end)}"/>'
        return name + stem + _point(end, middle, mark.colour) + text
    width = _number(max(1.0, end - _LEFT))
    return f'{name}<rect class="c{mark.colour}" x="{_LEFT}" y="{middle - 7}" width="{width}" height="14" rx="2"/>{text}'


def _emphasis(colour: int) -> str:
    return "ours" if colour in _OURS else "quiet"


def _point(x: float, y: float, colour: int) -> str:
    return f'<circle class="c{colour}" cx="{_number(x)}" cy="{_number(y)}" r="{_MARK}"/>'


def _upright(x: float, bottom: int, text: str) -> str:
    line = f'<path class="grid" d="M{_number(x)} {_TOP}V{bottom}"/>'
    return line + _text(x, bottom + 18, text, "quiet", anchor="middle")


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_number(x)}" y="{_number(y)}"{style}{place}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _tick_text(tick: float) -> str:
    if tick >= _THOUSANDS:
        return f"{tick / 1000:,.0f} k"
    return f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"


# --- axes ------------------------------------------------------------------------------------------------------------
def _linear(values: Sequence[float], start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value stands, and the values to mark: from zero in two to five steps of 1, 2 or 5."""
    largest = max(values, default=1.0) or 1.0
    power = 10 ** math.floor(math.log10(largest))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2) if largest <= 5 * factor * power)
    ticks = [step * number for number in range(math.floor(largest / step) + 1)]
    return lambda value: start + (end - start) * value / largest, ticks


def _logarithmic(
    values: Sequence[float], start: float, end: float, *, is_tight: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value stands, and the values to mark: powers of ten, from below the lowest to the highest."""
    low, high = math.log10(min(values)), math.log10(max(values))
    if not is_tight:
        low, high = math.floor(low - 0.05), max(math.ceil(high), math.floor(low - 0.05) + 1)
    return (
        lambda value: start + (end - start) * (math.log10(value) - low) / ((high - low) or 1),
        [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)],
    )
