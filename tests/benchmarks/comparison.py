"""Contenders measured in turn, A B A B, so that what else the machine does hits all alike; medians, and their ratio."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians.

    Args:
        value: It.
        low: The smallest ratio of any round.
        high: The largest.
    """

    value: float
    low: float
    high: float

    def text(self) -> str:
        """Return it as it is shown; a single round, or rounds that all agree, have no spread."""
        spread = f" [{self.low:.3g}, {self.high:.3g}]" if self.low < self.high else ""
        return f"{self.value:.3g}{spread}"


@dataclass(frozen=True)
class Comparison:
    """What each contender measured, round by round.

    Args:
        rounds: Per contender a list of rounds, each a list of values.
    """

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
    """Measure contenders in turn.

    Args:
        contenders: By name, what measures once.
        rounds: How often it is each one's turn.
        times: How often a contender measures within its turn, if not once.

    Returns:
        What each measured, round by round.
    """
    turns: dict[str, list[list[Measured]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            turns[name].append([measure() for _ in range((times or {}).get(name, 1))])
    return turns


def compare(turns: Mapping[str, Sequence[Sequence[Measured]]], value: Callable[[Measured], float]) -> Comparison:
    """Compare one value of what contenders measured in turn.

    Args:
        turns: What `take_turns` returned.
        value: Takes the value out of one measurement.
    """
    return Comparison({name: [list(map(value, turn)) for turn in some] for name, some in turns.items()})


def interleave(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, times: Mapping[str, int] | None = None
) -> Comparison:
    """Measure contenders in turn, each a single value.

    Args:
        contenders: By name, what measures once.
        rounds: How often it is each one's turn.
        times: How often a contender measures within its turn, if not once.

    Returns:
        All values.
    """
    return Comparison(take_turns(contenders, rounds=rounds, times=times))
