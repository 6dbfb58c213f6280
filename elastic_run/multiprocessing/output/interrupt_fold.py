"""Shows the equal KeyboardInterrupts of several workers once on the console, after Ctrl-C.

Rules
- It exists only since SIGINT was sent to the workers. Before, no byte is looked at.
- From the first line of a traceback on, a stream is held for `_HOLD` seconds, at most `_MOST_BYTES`, or until its end.
  Then tracebacks that end with KeyboardInterrupt are left out if the same text was shown for another worker. All other
  bytes are shown, in their order.
- Log files and the tail for the report get every byte before, from the channel. A tee'd stream is not folded while
  the console lags behind it (its backlog remembers positions in the log file), nor with a filter, whose file is a log.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.outlet import Outlet

#: Seconds: Python writes a traceback line by line, and reads the program's files for it.
_HOLD = 0.5
_MOST_BYTES = 1 << 16
_FIRST_LINE = b"Traceback (most recent call last):\n"
_FRAMES = rb"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)*"
_LINK = (
    rb"\n(?:During handling of the above exception, another exception occurred"
    rb"|The above exception was the direct cause of the following exception):\n\n"
)
#: A chain of tracebacks of which the last one, and perhaps others, is a KeyboardInterrupt. Python 3.13 writes colours.
_INTERRUPT = re.compile(
    rb"(?:%b\S[^\n]*\n%b)*%b(?:\x1b\[[\d;]*m)?KeyboardInterrupt\b[^\n]*\n(?!%b)" % (_FRAMES, _LINK, _FRAMES, _LINK)
)
_PLACE = re.compile(rb'File "(?:\x1b\[[\d;]*m)?([^"\x1b]*)[^\n]*? line (?:\x1b\[[\d;]*m)?(\d+)')


class InterruptFold:
    """The KeyboardInterrupts of the workers of one round.

    Args:
        loop: For the timers.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._ranks: dict[bytes, list[int]] = {}

    def wrap(self, local_rank: int, outlet: Outlet | FoldedOutlet) -> FoldedOutlet:
        """Return an outlet that takes the place of a worker's."""
        return FoldedOutlet(outlet, self._loop, lambda text: self._is_first(local_rank, text))

    def _is_first(self, local_rank: int, text: bytes) -> bool:
        ranks = self._ranks.setdefault(text, [])
        is_first = not ranks or ranks[0] == local_rank
        if local_rank not in ranks:
            ranks.append(local_rank)
        return is_first

    def list_folded(self) -> list[tuple[str, list[int]]]:
        """Return the place of each traceback that was shown once for several workers, and their local ranks."""
        return [(_find_place(text), sorted(ranks)) for text, ranks in self._ranks.items() if len(ranks) > 1]


class FoldedOutlet:
    """Holds the tracebacks of one stream, and passes on what is shown.

    Args:
        outlet: Where the bytes go.
        loop: For the timer.
        is_first: Called with a traceback of a KeyboardInterrupt; returns whether it has to be shown.
    """

    def __init__(self, outlet: Outlet | FoldedOutlet, loop: Loop, is_first: Callable[[bytes], bool]) -> None:
        self._outlet = outlet
        self._loop = loop
        self._is_first = is_first
        self._held = bytearray()
        self._timer: Timer | None = None

    @property
    def is_ready(self) -> bool:
        """Whether more may be taken now without growing."""
        return self._outlet.is_ready

    @property
    def is_free(self) -> bool:
        """Whether bytes may be left out of what it takes next."""
        return self._outlet.is_free

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Call once, as soon as it is clear."""
        self._outlet.when_clear(callback)

    def take(self, data: bytes) -> None:
        """Accept the next bytes."""
        if self._held:
            self._held += data
            if len(self._held) > _MOST_BYTES:
                self._release()
            return
        start = data.find(_FIRST_LINE)
        if start < 0 or not self._outlet.is_free:
            self._outlet.take(data)
            return
        if start:
            self._outlet.take(data[:start])
        self._held += data[start:]
        self._timer = self._loop.call_later(_HOLD, self._release)

    def end(self) -> None:
        """Accept that nothing follows."""
        self._release()
        self._outlet.end()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = bytes(self._held)
        self._held.clear()
        if held and self._outlet.is_free:
            held = _INTERRUPT.sub(lambda found: found[0] if self._is_first(found[0]) else b"", held)
        if held:
            self._outlet.take(held)


def _find_place(text: bytes) -> str:
    """Return the innermost frame as `train.py:88`, or ""."""
    places = _PLACE.findall(text)
    if not places:
        return ""
    path, number = places[-1]
    return f"{path.decode(errors='replace').rpartition('/')[2]}:{number.decode()}"
