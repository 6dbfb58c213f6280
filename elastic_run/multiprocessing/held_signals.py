"""Signals that come while processes are being started: they wait until each process has somebody who knows of it.

A mask of the main thread would not do: in a notebook other threads take the signal, and Python then runs its handler in
the main thread all the same, between a fork and the line that notes the new process.
"""

from __future__ import annotations

import signal
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any

__all__ = ["HeldSignals"]


class HeldSignals:
    """Holds signals back; does nothing outside the main thread, where Python answers none.

    Args:
        numbers: The signals.

    Attributes:
        handlers: What answered each before `hold`.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.handlers: dict[int, Any] = {}
        self._numbers = tuple(numbers)
        self._pending: list[int] = []

    def hold(self) -> None:
        """Take note of the signals from now on instead of answering them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            previous = signal.signal(number, self._note)
            # None: code in C answers it, which can't be put back.
            self.handlers[number] = signal.SIG_DFL if previous is None else previous

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def give_back(self) -> None:
        """Let the signals be answered as before, also in a process that was forked meanwhile."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def deliver(self) -> None:
        """Send those that have come once more, for who answers them now; it may raise, as a handler does."""
        while self._pending:
            signal.raise_signal(self._pending.pop(0))

    def release(self) -> None:
        """Let the signals be answered as before, those that have come at once."""
        self.give_back()
        self.deliver()
