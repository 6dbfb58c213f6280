"""Reads the workers' processor time and memory for the event log; the page of the job's history draws curves of it.

A reading costs 20 us for each worker. A timer of its own reads only if the user asked for what needs the loop anyway
(--events-file, --metrics-port, --hang-timeout): every 10 s, and once a minute after an hour. With a log directory
alone, the existing watch over quiet rounds reads every five minutes, so an idle launcher is never woken for it.
"""

from __future__ import annotations

import os

from elastic_run.multiprocessing.process.process_table import read_stat
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.round import Round
    from elastic_run.loop import Loop, Timer

#: Seconds between two readings: at first, at most, and how many parts of the round's age.
_SHORTEST = 10.0
_LONGEST = 60.0
_PARTS = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker's process has used.

    Args:
        cpu: Seconds of processor time so far.
        memory: Resident bytes now.
    """

    cpu: float
    memory: int


def read_usage(current: Round) -> dict[int, Usage]:
    """Return what the workers that run have used, by local rank; their children are not in it."""
    pids = current.workers.pids
    stats = {rank: read_stat(pids[rank]) for rank in sorted(current.workers.alive)}
    return {rank: Usage(stat.cpu / _TICKS, stat.memory * _PAGE) for rank, stat in stats.items() if stat is not None}


class ResourceReader:
    """Reads again and again, until the round is stopped.

    Args:
        loop: The agent's loop.
        read: Called for each reading.
    """

    def __init__(self, loop: Loop, read: Callable[[], None]) -> None:
        self._loop = loop
        self._read = read
        self._began_at = loop.now()
        self._timer: Timer = loop.call_later(_SHORTEST, self._look)

    def close(self) -> None:
        """Read no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._read()
        age = self._loop.now() - self._began_at
        self._timer = self._loop.call_later(max(_SHORTEST, min(_LONGEST, age / _PARTS)), self._look)
