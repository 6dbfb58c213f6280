"""The plots of docs/plots, one idea each, made of recorded figures and nothing else.

Each figure says in which plots it stands and under what name (`Figure.plots`). A plot without figures isn't drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.benchmarks.drawing import Curve, Group, Mark, draw_curves, draw_groups
from tests.benchmarks.figures import CONTENDERS, Figure, with_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_COLOURS = {"elastic-run": 0, "torchrun": 1, "ft_launcher": 2, "floor": 3}
_PRELOAD_COLOUR = 4
#: Times better than torchrun from which a plot says so.
_NOTEWORTHY = 1.1
_LOGARITHMIC = ", logarithmic; less is better"


@dataclass(frozen=True)
class Plot:
    """One file.

    Args:
        title: What it shows.
        axis: Unit, scale, and which way is better.
        draw: Makes it of the figures that stand in it: the plot's name comes first, then title, axis and figures.
    """

    title: str
    axis: str
    draw: Callable[[str, str, str, Sequence[Figure]], str]


def draw_all(figures: Sequence[Figure]) -> dict[str, str]:
    """Return the plots' SVG, by name.

    Args:
        figures: All that are recorded.
    """
    found = {name: [figure for figure in figures if name in figure.plots] for name in PLOTS}
    return {
        name: PLOTS[name].draw(name, PLOTS[name].title, PLOTS[name].axis, some) for name, some in found.items() if some
    }


def _draw_contenders(name: str, title: str, axis: str, figures: Sequence[Figure]) -> str:
    """Draw each contender's value; figures of one heading share a group, in which the others stand once."""
    headings: dict[str, list[Figure]] = {}
    for figure in figures:
        headings.setdefault(figure.plots[name], []).append(figure)
    groups = [Group(heading, [*map(_our_mark, some), *_others(some[0])]) for heading, some in headings.items()]
    return draw_groups(title, axis, groups, is_logarithmic="logarithmic" in axis)


def _draw_shares(name: str, title: str, axis: str, figures: Sequence[Figure]) -> str:
    """Draw our values as shares of torchrun's, those of one heading together."""
    headings: dict[str, list[Mark]] = {}
    for figure in figures:
        if figure.torchrun:
            share = 100 * figure.elastic_run / figure.torchrun
            mark = replace(_our_mark(figure), value=share, text=f"{share:.0f} %  ({_our_value(figure)})")
            headings.setdefault(figure.plots[name], []).append(mark)
    torchrun = Mark("torchrun", 100.0, "100 %", _COLOURS["torchrun"])
    groups = [Group(heading, [*marks, torchrun]) for heading, marks in headings.items()]
    return draw_groups(title, axis, groups, is_logarithmic=False)


def _draw_sizes(name: str, title: str, axis: str, figures: Sequence[Figure]) -> str:
    """Draw curves of figures whose name here is a size, those of each contender and of ours on etcd."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for figure in figures:
        size = figure.plots[name]
        for contender in CONTENDERS:
            value = figure.value(contender)
            if value:
                points.setdefault(contender, []).append((float(size), value, with_unit(value, figure.unit)))
    curves = [Curve(contender, some, _COLOURS[contender]) for contender, some in points.items()]
    return draw_curves(title, axis, "nodes", curves)


def _others(figure: Figure) -> list[Mark]:
    """Return a mark for each contender but us, the slowest last; a logarithm has no place for zero."""
    marks = [
        Mark(contender, value, with_unit(value, figure.unit), _COLOURS[contender])
        for contender in CONTENDERS[1:]
        if (value := figure.value(contender))
    ]
    return sorted(marks, key=lambda mark: mark.value, reverse=figure.is_more_better)


def _our_mark(figure: Figure) -> Mark:
    """Return our mark: our value, and how much better than torchrun's it is, where that can be seen."""
    is_preloaded = "--preload" in figure.name
    text = _our_value(figure)
    if figure.torchrun and figure.elastic_run:
        times = figure.elastic_run / figure.torchrun
        times = times if figure.is_more_better else 1 / times
        if times >= _NOTEWORTHY:
            text += f"  ({times:.{0 if times >= 10 else 1}f} x {'smaller' if figure.unit == 'MB' else 'faster'})"
    return Mark(
        "--preload" if is_preloaded else "elastic-run",
        figure.elastic_run,
        text,
        _PRELOAD_COLOUR if is_preloaded else _COLOURS["elastic-run"],
    )


def _our_value(figure: Figure) -> str:
    return with_unit(figure.elastic_run, figure.unit)


PLOTS: Mapping[str, Plot] = {
    "start": Plot("Start: exec to the first line of the last worker", "milliseconds" + _LOGARITHMIC, _draw_contenders),
    "first_collective": Plot(
        "First collective: exec to the all-reduce of the last worker", "milliseconds; less is better", _draw_contenders
    ),
    "detection": Plot("Detection: a worker's death to …", "milliseconds" + _LOGARITHMIC, _draw_contenders),
    "restart": Plot(
        "Restart: a worker's death to the next round at work", "milliseconds" + _LOGARITHMIC, _draw_contenders
    ),
    "warm": Plot("Cold and warm: shares of what torchrun takes", "per cent; less is better", _draw_shares),
    "scale": Plot(
        "Rendezvous: nodes started at once to the last one in the round",
        "seconds, logarithmic; less is better",
        _draw_sizes,
    ),
    "tee": Plot("--tee: output of 2 workers to the console", "MB/s; more is better", _draw_contenders),
    "footprint": Plot("Footprint: memory (PSS) of …", "megabytes" + _LOGARITHMIC, _draw_contenders),
}
