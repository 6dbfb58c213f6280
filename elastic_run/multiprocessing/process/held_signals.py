"""Holds signals back while processes are started, until this program has noted each new process.

A signal mask of the main thread would not be enough: in a notebook another thread takes the signal, and Python still
runs its handler in the main thread, between a fork and the line that notes the new process.
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
        """Restore the signal handlers, also in a process that was forked during the hold."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def deliver(self) -> None:
        """Send the held signals again, to the restored handlers; it may raise, as a handler does."""
        while self._pending:
            signal.raise_signal(self._pending.pop(0))

    def release(self) -> None:
        """Restore the signal handlers, and deliver the held signals."""
        self.give_back()
        self.deliver()
