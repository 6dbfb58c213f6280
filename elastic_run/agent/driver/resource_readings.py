"""Reads the workers' processor time and memory for the event log; the page of the job's history draws curves of it.

A reading costs 40 us for each worker. A timer of its own reads only if the user asked for what needs the loop anyway
(--events-file, --metrics-port, --hang-timeout): every 10 s, and once a minute after an hour. With a log directory
alone, the existing watch over quiet rounds reads every five minutes, so an idle launcher is never woken for it.
"""

from __future__ import annotations

import psutil

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


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker's process has used.

    Args:
        cpu: Seconds of processor time so far.
        memory: Resident bytes now.
        state: The process's state in psutil's words.
    """

    cpu: float
    memory: int
    state: str


def read_usage(current: Round) -> dict[int, Usage]:
    """Return what the workers that run have used, by local rank; their children are not in it."""
    pids = current.workers.pids
    found = {rank: read_process(pids[rank]) for rank in sorted(current.workers.alive)}
    return {rank: usage for rank, usage in found.items() if usage is not None}


def read_process(pid: int) -> Usage | None:
    """Return what one process has used, or None where that can't be read."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return Usage(cpu.user + cpu.system, process.memory_info().rss, process.status())
    except (psutil.Error, OSError):
        return None  # it has ended, or no file can be opened


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
