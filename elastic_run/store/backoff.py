"""The pauses between attempts: longer each time, and of random length, so that clients don't ask in step.

A thousand clients whose store was slow for a moment ask again at the same time, and again at the same time after that:
then it is slow because they ask. So each pause is drawn from all lengths up to a bound that doubles (full jitter).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Backoff", "draw_fraction"]


def draw_fraction() -> float:
    """Return a random number from 0 to 1, without 1; the module `random` would take milliseconds to import."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


class Backoff:
    """Counts failures in a row, and says how long to wait after each.

    Args:
        first: Seconds that the first pause takes at most.
        longest: Seconds that any pause takes at most.
        draw: Returns a random number from 0 to 1.
    """

    def __init__(self, first: float, longest: float, draw: Callable[[], float] = draw_fraction) -> None:
        self._first = first
        self._longest = longest
        self._bound = first
        self._draw = draw

    def next_pause(self, longest: float | None = None) -> float:
        """Return how long to wait now; the next pause may be twice as long.

        Args:
            longest: Seconds that pauses take at most from now on until `reset`, where that is less than usual.

        Returns:
            Seconds.
        """
        limit = self._longest if longest is None else min(longest, self._longest)
        bound = min(self._bound, limit)
        self._bound = min(2 * bound, self._longest)
        return bound * self._draw()

    def reset(self) -> None:
        """Begin anew: it has worked."""
        self._bound = self._first
