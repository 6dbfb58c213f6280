"""One line on the user's terminal during a wait for nodes or for the store, rewritten once a second.

Rules
- The line stands below all other output: the console removes it before it writes anything, and the next second shows it
  again. When the wait is over the line is removed, and its last text stays as an ordinary line.
- The line can't be shown if workers have the terminal, if this job is in the shell's background, or if the line of
  another program is not finished. In these cases the user gets ordinary lines as without a terminal (`wait_texts`).
- A timer runs only during a wait.
- During a wait, records of the `logging` module that would go straight to the terminal go through the console.
"""

from __future__ import annotations

import logging

from elastic_run.multiprocessing.output.wiring import STDERR
from elastic_run.report.text import columns, elide, printable
from elastic_run.report.wait_texts import INTERVAL, LIVE_INTERVAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Console

    #: The line at a monotonic time, the longest form first.
    Texts: TypeAlias = Callable[[float], tuple[str, ...]]

__all__ = ["WaitLine"]

_NAME = "elastic-run: "
_MINUTE = 60


class WaitLine:
    """The line of one agent."""

    def __init__(self, loop: Loop, console: Console) -> None:
        self._loop = loop
        self._console = console
        self._texts: Texts | None = None
        self._is_live = True
        self._since = 0.0
        self._last_plain: float | None = None
        self._timer: Timer | None = None
        self._log = _ConsoleHandler(loop, console)

    def show(self, texts: Texts, *, is_live: bool) -> None:
        """Begin to show a wait.

        Args:
            texts: Returns the line at a monotonic time.
            is_live: Whether one line may be rewritten; otherwise ordinary lines are written.
        """
        if self._texts is None:
            self._since = self._loop.now()
            self._last_plain = None
            self._log.install()
        self._texts, self._is_live = texts, is_live
        if self._timer is None:
            self._rewrite()

    def end(self, last: str | None = None) -> None:
        """Remove the line; do nothing if there is none.

        Args:
            last: Text of the line that stays, to which the time of the wait is added; "" for no line; None for the text
                that was shown last.
        """
        if self._texts is None:
            return
        texts, self._texts = self._texts, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._log.remove()
        self._console.hide_line()
        if last is None:
            self._console.say(printable(texts(self._loop.now())[0]))
        elif last:
            minutes, seconds = divmod(round(self._loop.now() - self._since), _MINUTE)
            self._console.say(f"{last} after {minutes}:{seconds:02d}")

    def _rewrite(self) -> None:
        if self._texts is None:
            return
        now = self._loop.now()
        forms = [printable(text) for text in self._texts(now)]
        is_shown = self._is_live and not self._console.is_in_background and self._console.show_line(self._fit(forms))
        if not is_shown:
            self._console.hide_line()
        if is_shown:
            self._last_plain = now
        elif self._last_plain is None or now - self._last_plain >= INTERVAL:
            self._console.say(forms[0])
            self._last_plain = now
        self._timer = self._loop.call_later(LIVE_INTERVAL, self._rewrite)

    def _fit(self, forms: list[str]) -> str:
        """Return the longest form that fits; the last column stays free, since some terminals break the line there."""
        room = self._console.columns - 1
        whole = [*(f"{_NAME}{form}" for form in forms), *forms]
        return next((text for text in whole if columns(text) <= room), elide(whole[-1], room))


class _ConsoleHandler(logging.Handler):
    """Sends log records of all threads to the console, if the program has configured no other handler."""

    def __init__(self, loop: Loop, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self._console = console
        self._logger = logging.getLogger("elastic_run")

    def install(self) -> None:
        if not self._logger.hasHandlers():
            self._logger.addHandler(self)

    def remove(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="replace")
        self._loop.call_soon_threadsafe(lambda: self._console.write(STDERR, line))
