"""A figure and its bar: one row of the tables, one place in the plots.

A figure is what all contenders of a benchmark measured of one thing. Of which contenders there can be, `CONTENDERS`
says. `compared` makes a figure of measurements taken in turns, `alone` one of ours that stands beside nothing; the few
that are neither are made directly. However it is made, a figure keeps all values that it was made of.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.benchmarks.comparison import Ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tests.benchmarks.comparison import Comparison

#: Who may be measured; the names of the columns, and those of `Figure`'s fields but for the dash.
CONTENDERS = ("elastic-run", "torchrun", "ft_launcher", "floor")
#: Values this close are even: a share of the smaller one.
EVEN = 0.02
HEADINGS = ("figure", "bar", *CONTENDERS, "ratio", "times", "met")


@dataclass(frozen=True)
class Bar:
    """What a figure has to hold.

    Args:
        limit: The bound.
        of: What the bound is a multiple of: `torchrun` or `floor`; empty where it is in the figure's own unit.
        is_least: Whether the bound is one from below.
    """

    limit: float
    of: str = ""
    is_least: bool = False

    def is_met(self, value: float) -> bool:
        """Tell whether a value, or a ratio, is within the bound."""
        return value >= self.limit if self.is_least else value <= self.limit

    def text(self, unit: str) -> str:
        """Return the bar in words."""
        sign = "≥" if self.is_least else "≤"
        return f"{sign} {self.limit:g} x {self.of}" if self.of else f"{sign} {self.limit:g} {unit}".rstrip()


@dataclass(frozen=True)
class Figure:
    """One row of a table.

    Args:
        benchmark: The benchmark that it belongs to.
        name: What was measured.
        unit: Unit of the values.
        bar: What it has to hold, or None where it stands for information.
        elastic_run: Our value.
        torchrun: torchrun's, where it was measured.
        ft_launcher: That of the launcher of NVIDIA's resiliency extension, where it was measured.
        floor: The floor's, where there is one.
        ratio: Our value by the one that the bar names, else by torchrun's.
        note: What a reader should know.
        headline: What the README calls it; empty if the README does not show it.
        plots: The plots that show it, and what each calls it.
        values: What each contender measured, or was measured of each size, turn by turn. Older recordings lack some.
    """

    benchmark: str
    name: str
    unit: str
    bar: Bar | None
    elastic_run: float
    values: Mapping[str, list[list[float]]]
    torchrun: float | None = None
    ft_launcher: float | None = None
    floor: float | None = None
    ratio: Ratio | None = None
    note: str = ""
    headline: str = ""
    plots: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Whether it holds its bar; no bar, nothing to miss."""
        if self.bar is None:
            return True
        value = self.ratio.value if self.bar.of and self.ratio else self.elastic_run
        return self.bar.is_met(value)

    @property
    def is_more_better(self) -> bool:
        """Whether the larger value is the better one."""
        return self.bar is not None and self.bar.is_least

    @property
    def is_worse(self) -> bool:
        """Whether torchrun did better, by more than `EVEN`."""
        if self.torchrun is None:
            return False
        ours, theirs = self.elastic_run, self.torchrun
        return theirs > ours * (1 + EVEN) if self.is_more_better else ours > theirs * (1 + EVEN)

    def value(self, contender: str) -> float | None:
        """Return what a contender measured, None where it didn't take part."""
        found: float | None = getattr(self, contender.replace("-", "_"))
        return found

    def cells(self) -> list[str]:
        """Return the row's cells, in the order of `HEADINGS`."""
        ratio = self.ratio.text() if self.ratio else ""
        verdict = "" if self.bar is None else "yes" if self.is_met else "NO"
        bar = self.bar.text(self.unit) if self.bar else ""
        values = [with_unit(self.value(contender), self.unit) for contender in CONTENDERS]
        return [self.name, bar, *values, ratio, self._times(), verdict]

    def _times(self) -> str:
        """Return how often each contender was measured: one number if all were equally often, else in their order."""
        ours_first = sorted(self.values, key=lambda name: not name.startswith(CONTENDERS[0]))
        counts = [str(sum(map(len, self.values[name]))) for name in ours_first]
        return ", ".join(counts if len(set(counts)) > 1 else counts[:1])


def compared(
    comparison: Comparison,
    *,
    bar: Bar | None = None,
    ours: str = "elastic-run",
    **described: Any,
) -> Figure:
    """Make a figure of what contenders measured in turns.

    Args:
        comparison: Who measured what.
        bar: What the figure has to hold.
        ours: The contender that stands in our column.
        described: The other fields of `Figure`.

    Returns:
        Medians, and the ratio to the one that the bar names, else to torchrun.
    """
    columns = {contender: contender for contender in CONTENDERS[1:] if contender in comparison.rounds}
    columns["elastic-run"] = ours
    against = bar.of if bar and bar.of else "torchrun"
    fields: dict[str, Any] = {column.replace("-", "_"): comparison.median(name) for column, name in columns.items()}
    return Figure(
        bar=bar,
        ratio=comparison.ratio(ours, against) if against in columns else None,
        values={name: comparison.rounds[name] for name in columns.values()},
        **fields,
        **described,
    )


def alone(
    values: Iterable[float],
    *,
    summary: Callable[[Sequence[float]], float] = median,
    **described: Any,
) -> Figure:
    """Make a figure of what was measured of elastic-run alone.

    Args:
        values: All of them.
        summary: Makes one of them, which stands in our column.
        described: The other fields of `Figure`.
    """
    each = list(values)
    return Figure(elastic_run=summary(each), values={CONTENDERS[0]: [each]}, **described)


def counted(are_failures: Iterable[bool], **described: Any) -> Figure:
    """Make a figure of how often elastic-run failed, which it never may.

    Args:
        are_failures: Whether it did, each time.
        described: The other fields of `Figure`.
    """
    return alone(map(float, are_failures), summary=sum, unit="", bar=Bar(0.0), **described)


def with_unit(value: float | None, unit: str) -> str:
    """Return a value as it is shown, with at least three digits that count; nothing where there is none."""
    if value is None:
        return ""
    number = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def console_lines(figures: Iterable[Figure]) -> list[str]:
    """Return the table for a console."""
    rows = [list(HEADINGS), *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def to_json(figure: Figure) -> dict[str, Any]:
    """Return a figure as it is recorded."""
    return asdict(figure)


def from_json(record: Mapping[str, Any]) -> Figure:
    """Return the figure that was recorded.

    Args:
        record: What `to_json` returned.
    """
    bar, ratio = record["bar"], record["ratio"]
    return Figure(**{**record, "bar": bar and Bar(**bar), "ratio": ratio and Ratio(**ratio)})
