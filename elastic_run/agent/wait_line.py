"""What a node waits for, as one line on the user's terminal that is rewritten once a second.

Rules
- It stands below everything else: the console takes it away before it writes anything, and the next second brings it
  back. When the wait is over it is gone, and what it said last stays as an ordinary line.
- Where it can't be shown (workers have the terminal, this job is in the shell's background, somebody's line is not
  finished) the user gets an ordinary line every ten seconds instead, as where there is no terminal at all.
- A timer runs only while something is waited for.
- What the `logging` module would write straight to the terminal goes through the console meanwhile.
"""

from __future__ import annotations

import logging

from elastic_run.multiprocessing.output.ends import STDERR
from elastic_run.report.text import columns, elide, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Console

    #: The line at a monotonic time, the longest form first.
    Texts: TypeAlias = Callable[[float], tuple[str, ...]]

__all__ = ["WaitLine"]

_REWRITE = 1.0
#: Seconds between two ordinary lines.
_PLAIN = 10.0
_NAME = "elastic-run: "
_MINUTE = 60


class WaitLine:
    """The line.

    Args:
        loop: The agent's loop.
        console: The launcher's stderr.
    """

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
        """Show from now on that something is waited for.

        Args:
            texts: What, at a time.
            is_live: Whether it may be rewritten; else ordinary lines are written.
        """
        if self._texts is None:
            self._since = self._loop.now()
            self._last_plain = None
            self._log.install()
        self._texts, self._is_live = texts, is_live
        if self._timer is None:
            self._rewrite()

    def end(self, last: str | None = None) -> None:
        """Take the line away; harmless when there is none.

        Args:
            last: What stays, with the time that was waited; empty for nothing; None for what was shown last.
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
        elif self._last_plain is None or now - self._last_plain >= _PLAIN:
            self._console.say(forms[0])
            self._last_plain = now
        self._timer = self._loop.call_later(_REWRITE, self._rewrite)

    def _fit(self, forms: list[str]) -> str:
        """Return the longest form that fits; the last column stays free, since some terminals break the line there."""
        room = self._console.columns - 1
        whole = [*(f"{_NAME}{form}" for form in forms), *forms]
        return next((text for text in whole if columns(text) <= room), elide(whole[-1], room))


class _ConsoleHandler(logging.Handler):
    """Brings what is logged, by any thread, to the console, where nobody has said where it is to go."""

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
