"""Waiting for a condition, with a deadline. The one place in the tests that polls.

Tests never sleep "long enough". What has a descriptor is waited for on it (`Launched.wait_line`, `wait_exit`). What the
kernel gives no descriptor for (a process of a stranger gone, a file written) is asked for again and again here.

Every deadline and every bound on a time is for a quiet machine. Where other programs have the processors it is
`stretched`: a promise in seconds can only be kept by who gets to run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Seconds any single wait of a test may take, unless it says otherwise. Generous: machines of CI are slow.
DEADLINE = 60.0
#: Seconds between two looks, at least and at most.
_INTERVAL, _LONGEST_INTERVAL = 0.005, 0.25
_LOAD = Path("/proc/loadavg")


class DeadlinePassedError(AssertionError):
    """What a test waited for did not happen in time."""


def stretched(seconds: float) -> float:
    """Return a time limit that is as much longer as the machine is busy now."""
    words = _LOAD.read_text(encoding="ascii").split()
    running = int(words[3].partition("/")[0]) - 1  # without this process
    return seconds * (1.0 + max(float(words[0]), running) / len(os.sched_getaffinity(0)))


def wait_until(predicate: Callable[[], T], *, deadline: float = DEADLINE, what: str = "") -> T:
    """Ask until the answer is true."""
    begin = time.monotonic()
    while True:
        asked = time.monotonic()
        answer = predicate()
        if answer:
            return answer
        now = time.monotonic()
        passed = now - begin
        if passed > deadline and passed > stretched(deadline):
            message = f"not within {deadline} s: {what or predicate}"
            raise DeadlinePassedError(message)
        # The pause grows with the time that an answer takes and with the time waited: the programs under test need the
        # processors.
        rest = max(_INTERVAL, deadline - passed) if passed < deadline else _LONGEST_INTERVAL
        time.sleep(min(_LONGEST_INTERVAL, rest, max(_INTERVAL, 4 * (now - asked), passed / 50)))
