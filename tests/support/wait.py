"""Waiting for a condition, with a deadline. The one place in the tests that polls.

Tests never sleep "long enough". What has a descriptor is waited for on it (`Launched.wait_line`, `wait_exit`). What the
kernel gives no descriptor for (a process of a stranger gone, a file written) is asked for again and again here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Seconds any single wait of a test may take, unless it says otherwise. Generous: machines of CI are slow.
DEADLINE = 30.0
_INTERVAL = 0.005


class DeadlinePassedError(AssertionError):
    """What a test waited for did not happen in time."""


def wait_until(predicate: Callable[[], T], *, deadline: float = DEADLINE, what: str = "") -> T:
    """Ask until the answer is true.

    Args:
        predicate: The question. It must have no effect.
        deadline: Seconds from now.
        what: What is waited for, for the message.

    Returns:
        The first true answer.

    Raises:
        DeadlinePassedError: The answer was never true.
    """
    end = time.monotonic() + deadline
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > end:
            message = f"not within {deadline} s: {what or predicate}"
            raise DeadlinePassedError(message)
        time.sleep(_INTERVAL)
