"""How busy others keep the machine, looked at while nothing of ours runs.

A load average can't tell: it still holds what the benchmark before did, minutes later. The kernel's count of ticks, at
both ends of a short wait, holds that wait alone; what the host of a virtual machine takes away counts as busy as well.
"""

from __future__ import annotations

import time
from pathlib import Path

#: Seconds to look for. A tick is a hundredth of one, on each processor.
_LOOK = 0.5
#: Of the fields of /proc/stat's first line: idle and waiting for a disk; those behind the eighth are in others already.
_IDLE, _KNOWN = slice(3, 5), slice(0, 8)
_STAT = Path("/proc/stat")


def busy_share() -> float:
    """Return which share of the processors is busy while this process sleeps."""
    before = _STAT.read_text(encoding="ascii")
    time.sleep(_LOOK)
    return share_between(before, _STAT.read_text(encoding="ascii"))


def share_between(before: str, after: str) -> float:
    """Return the share of all processors' time that was not idle.

    Args:
        before: The kernel's count at one time, as /proc/stat has it.
        after: At a later time.
    """
    passed = [now - then for now, then in zip(_ticks(after), _ticks(before), strict=True)]
    return 1 - sum(passed[_IDLE]) / max(sum(passed), 1)


def _ticks(stat: str) -> list[int]:
    return [int(word) for word in stat.splitlines()[0].split()[1:][_KNOWN]]
