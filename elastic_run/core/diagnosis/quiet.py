"""Whether nothing happens in a round: no worker has written anything, and none has used a processor."""

from __future__ import annotations

from elastic_run.records import dataclass

#: Part of one processor that all background threads of a worker take at most while it waits.
_IDLE = 0.005


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of a round have done so far.

    Args:
        cpu: Seconds of processor time.
        written: Bytes that they have written to files, pipes and terminals.
        workers: Workers that run.
    """

    cpu: float
    written: int
    workers: int


def is_quiet(before: Activity, after: Activity, seconds: float) -> bool:
    """Whether nothing happened between two moments.

    Processes that have ended take their time with them, so less is a change too.

    Args:
        before: At the first moment.
        after: At the second.
        seconds: Between them.
    """
    if not after.workers or before.workers != after.workers or before.written != after.written:
        return False
    return abs(after.cpu - before.cpu) <= _IDLE * after.workers * seconds
