"""Finds out that the workers of a round do nothing any more, where the user has not asked for --hang-timeout.

A timer reads the workers' activity every five minutes and compares it with the last reading. So a job that begins to
hang is noticed after five to ten minutes, and a running job pays a millisecond every five minutes. The rounds of all
nodes begin at about the same time, and so do these readings. Every ordinary job has this watch, so it reads /proc as
the guardian does: psutil's import would take 16 ms and 2 MB.
"""

from __future__ import annotations

import os

from elastic_run.core.diagnosis.hang import Activity, is_quiet
from elastic_run.multiprocessing.process.descendants import find_descendants
from elastic_run.multiprocessing.process.process_table import read_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.loop import Loop, Timer

#: Seconds between two looks.
PERIOD = 300.0
_WRITTEN = b"wchar:"


class QuietWatch:
    """The watch over one round.

    Args:
        loop: The agent's loop.
        pids: Returns the pids of the workers that run.
        on_quiet: Called at each look with the seconds for which the workers have done nothing, if they have.
        on_look: Called at each look.
    """

    def __init__(
        self,
        loop: Loop,
        pids: Callable[[], Sequence[int]],
        on_quiet: Callable[[float], None],
        *,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._pids = pids
        self._on_quiet = on_quiet
        self._on_look = on_look
        self._before = read_activity(pids())
        self._at = loop.now()
        self._timer: Timer = loop.call_later(PERIOD, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._on_look()
        now, activity = self._loop.now(), read_activity(self._pids())
        before, seconds = self._before, now - self._at
        self._before, self._at = activity, now
        self._timer = self._loop.call_later(PERIOD, self._look)
        if is_quiet(before, activity, seconds):
            self._on_quiet(seconds)


def read_activity(workers: Sequence[int]) -> Activity:
    """Return CPU time and written bytes of workers and their descendants, such as data loaders, so far."""
    tick = os.sysconf("SC_CLK_TCK")
    pids = find_descendants(frozenset(workers), since=0)
    stats = [stat for pid in pids if (stat := read_stat(pid)) is not None]
    return Activity(sum(stat.cpu for stat in stats) / tick, sum(map(_read_written, pids)), len(workers))


def _read_written(pid: int) -> int:
    """Return how many bytes a process has written; 0 where the kernel doesn't tell."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(_WRITTEN)), 0)
    except OSError:
        return 0
