"""The texts of a wait, for other nodes or for a store that can't be reached, and when a line is shown again.

A line is shown after `FIRST` seconds, and again `INTERVAL` seconds later at the earliest. All agents of a Slurm job
write to one file: 64 agents that repeat a line every ten seconds for ten minutes write 3,840 lines there. So a line
that says the same is shown after pauses that grow. On a terminal the agent rewrites one line, so each text has forms of
different length.
"""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds of waiting after which the first line comes; between two lines; at most between two lines that say the same.
FIRST = 2.0
INTERVAL = 10.0
LONGEST_INTERVAL = 60.0
#: Seconds after which a rewritten line begins, and between two of its texts.
LIVE_INTERVAL = 1.0
_MINUTE = 60


class Repetition:
    """The line of one wait."""

    def __init__(self) -> None:
        self._text = ""
        self._shown_at = -math.inf
        self._pause = INTERVAL

    def is_due(self, text: str, now: float) -> bool:
        """Whether the line is shown now, which this notes.

        Args:
            text: The line without the parts that change by themselves, such as the time that is left.
            now: Monotonic seconds.
        """
        pause = self._pause if text == self._text else INTERVAL
        if now - self._shown_at < pause:
            return False
        self._pause = min(2 * pause, LONGEST_INTERVAL) if text == self._text else INTERVAL
        self._text, self._shown_at = text, now
        return True


def describe_missing(
    hosts: Sequence[str], present: int, wanted: int, left: float | None, *, starts: bool = False
) -> str:
    """Say which nodes are there.

    Args:
        hosts: Hosts of the nodes that are there, as a list for the user has them.
        present: The number of nodes that are there.
        wanted: The number of nodes that are waited for.
        left: Seconds until the wait ends, or None.
        starts: Whether the nodes that are there start then; otherwise they give up.

    Returns:
        Such as ``waiting: 10/11 nodes (node[0-3,5-10]), gives up in 9:50``.
    """
    shown = ", ".join(hosts)
    end = _describe_end(left, "starts" if starts else "gives up")
    return f"waiting: {present}/{wanted} nodes{f' ({shown})' if shown else ''}{end}"


def describe_trouble(store: str, trouble: str, silent_for: float, left: float | None) -> str:
    """Say why the store can't be reached.

    Args:
        store: The store's name, such as ``10.0.0.1:29400``.
        trouble: The reason with the address: ``nobody listens (connection refused) at 10.0.0.1:29400``.
        silent_for: Seconds since the store answered last, or since it was asked first.
        left: Seconds until the wait is given up, or None.

    Returns:
        Such as ``waiting: the store at node1:29400 has been out of reach for 12 s: nothing answers at
        10.0.0.1:29400, gives up in 9:50``.
    """
    fact = f"the store at {store} has been out of reach for {silent_for:.0f} s"
    return f"waiting: {fact}: {trouble}{_describe_end(left)}"


def missing_texts(
    hosts: Sequence[str], present: int, wanted: int, left: float | None, *, starts: bool = False
) -> tuple[str, ...]:
    """Return the forms of `describe_missing`, the longest first; the arguments are the same."""
    return tuple(describe_missing(shown, present, wanted, left, starts=starts) for shown in (hosts, ()))


def trouble_texts(store: str, trouble: str, silent_for: float, left: float | None, *, reason: str) -> tuple[str, ...]:
    """Return the forms of `describe_trouble`, the longest first."""
    end = _describe_end(left)
    return (
        describe_trouble(store, trouble, silent_for, left),
        f"waiting: store {store}: {reason}{end}",
        f"waiting: store: {reason}{end}",
    )


def describe_spare(present: int, wanted: int) -> str:
    """Say that the job runs, and this node isn't in it."""
    if present > wanted:
        return f"waiting: as a spare, until one of the job's {wanted} nodes is lost"
    return "waiting: the job runs, and adds this node soon"


def _describe_end(left: float | None, verb: str = "gives up") -> str:
    if left is None:
        return ""
    minutes, seconds = divmod(max(0, round(left)), _MINUTE)
    return f", {verb} in {minutes}:{seconds:02d}"
