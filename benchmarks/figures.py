"""Contenders that are measured in turns, and a figure: one row of the tables and one place in the plots.

Turns (A B A B) let all contenders suffer alike from what else the machine does. `compared` makes a figure of
measurements taken in turns, `alone` one of elastic-run by itself. A figure keeps all values that it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Measured = TypeVar("Measured")

#: The names of the columns, and of `Figure`'s fields but for the dash.
CONTENDERS = ("elastic-run", "torchrun", "ft_launcher", "floor")
#: Values this close are even: a share of the smaller one.
EVEN = 0.02
HEADINGS = ("figure", "bar", *CONTENDERS, "ratio", "times", "met")


# --- turns -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians, with the smallest and the largest ratio of any round."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        """Return it as it is shown; a single round, or rounds that all agree, have no spread."""
        spread = f" [{self.low:.3g}, {self.high:.3g}]" if self.low < self.high else ""
        return f"{self.value:.3g}{spread}"


@dataclass(frozen=True)
class Comparison:
    """What each contender measured: a list of rounds, each a list of values."""

    rounds: Mapping[str, list[list[float]]]

    def median(self, name: str) -> float:
        """Return the median of all values of a contender."""
        return median(value for values in self.rounds[name] for value in values)

    def worst(self, name: str) -> float:
        """Return the largest of all values of a contender."""
        return max(value for values in self.rounds[name] for value in values)

    def ratio(self, name: str, to: str) -> Ratio:
        """Return how a contender's median relates to another's, with the extremes over the rounds."""
        each = [median(mine) / median(theirs) for mine, theirs in zip(self.rounds[name], self.rounds[to], strict=True)]
        return Ratio(self.median(name) / self.median(to), min(each), max(each))


def take_turns(
    contenders: Mapping[str, Callable[[], Measured]], *, rounds: int, times: Mapping[str, int] | None = None
) -> dict[str, list[list[Measured]]]:
    """Measure contenders in turn; `times` says how often a contender measures within its turn, if not once."""
    turns: dict[str, list[list[Measured]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            turns[name].append([measure() for _ in range((times or {}).get(name, 1))])
    return turns


def compare(turns: Mapping[str, Sequence[Sequence[Measured]]], value: Callable[[Measured], float]) -> Comparison:
    """Compare one value of what contenders measured in turn."""
    return Comparison({name: [list(map(value, turn)) for turn in some] for name, some in turns.items()})


def interleave(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, times: Mapping[str, int] | None = None
) -> Comparison:
    """Measure contenders in turn, each a single value."""
    return Comparison(take_turns(contenders, rounds=rounds, times=times))


# --- figures ---------------------------------------------------------------------------------------------------------
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
        values: What each contender measured, or was measured of each size, turn by turn. Older recordings lack some.
        torchrun: torchrun's value, where it was measured.
        ft_launcher: That of the launcher of NVIDIA's resiliency extension, where it was measured.
        floor: The floor's, where there is one.
        ratio: Our value by that of the contender that the bar names, else by torchrun's.
        note: What a reader should know.
        headline: What the README calls it; empty if the README does not show it.
        plots: The plots that show it, and what each calls it.
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
        return value >= self.bar.limit if self.bar.is_least else value <= self.bar.limit

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
        # How often each contender was measured: one number if all were equally often, else in the columns' order.
        ours_first = sorted(self.values, key=lambda name: not name.startswith(CONTENDERS[0]))
        counts = [str(sum(map(len, self.values[name]))) for name in ours_first]
        times = ", ".join(counts if len(set(counts)) > 1 else counts[:1])
        return [self.name, bar, *values, ratio, times, verdict]


def compared(comparison: Comparison, *, bar: Bar | None = None, ours: str = "elastic-run", **described: Any) -> Figure:
    """Make a figure of what contenders measured in turns; `ours` is the contender that stands in our column."""
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


def alone(values: Iterable[float], *, summary: Callable[[Sequence[float]], float] = median, **described: Any) -> Figure:
    """Make a figure of what was measured of elastic-run alone."""
    each = list(values)
    return Figure(elastic_run=summary(each), values={CONTENDERS[0]: [each]}, **described)


def counted(are_failures: Iterable[bool], **described: Any) -> Figure:
    """Make a figure of how often elastic-run failed, which it never may."""
    return alone(map(float, are_failures), summary=sum, unit="", bar=Bar(0.0), **described)


def with_unit(value: float | None, unit: str) -> str:
    """Return a value as it is shown, with at least three digits that count; nothing where there is none."""
    if value is None:
        return ""
    number = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()
