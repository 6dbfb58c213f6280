"""Contenders measured in turn, A B A B, so that what else the machine does hits all alike; medians, and their ratio."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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


def interleave(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, times: Mapping[str, int] | None = None
) -> Comparison:
    """Measure contenders in turn.

    Args:
        contenders: By name, what measures once.
        rounds: How often it is each one's turn.
        times: How often a contender measures within its turn, if not once.

    Returns:
        All values.
    """
    values: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            values[name].append([measure() for _ in range((times or {}).get(name, 1))])
    return Comparison(values)
