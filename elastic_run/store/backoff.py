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
        self._longest = longest
        self._bound = first
        self._draw = draw

    def next_pause(self) -> float:
        """Return the seconds to wait now; the next pause may be twice as long."""
        bound, self._bound = self._bound, min(2 * self._bound, self._longest)
        return bound * self._draw()
