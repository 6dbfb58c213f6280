"""When a worker has last written, as far as its output passes through the launcher."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds without output that count as a silence.
SILENCE = 10.0
#: Bytes of the last output that are kept, to show its last line.
_KEPT = 512


class Activity:
    """The output of one worker, by time.

    Args:
        local_rank: Its number on this node.
        began_at: Monotonic seconds of its start.
        on_output: Called with the worker's first output, and with output that ends a silence: the local rank, and the
            silence in seconds, or None for the first output.

    Attributes:
        last: Monotonic seconds of its last output, or of its start.
    """

    __slots__ = ("_has_written", "_local_rank", "_on_output", "_recent", "last")

    def __init__(self, local_rank: int, began_at: float, on_output: Callable[[int, float | None], None]) -> None:
        self.last = began_at
        self._local_rank = local_rank
        self._has_written = False
        self._recent = b""
        self._on_output = on_output

    def note(self, now: float) -> None:
        """Take note of output."""
        silence, self.last = now - self.last, now
        if not self._has_written:
            self._has_written = True
            self._on_output(self._local_rank, None)
        if silence >= SILENCE:
            self._on_output(self._local_rank, silence)

    def keep(self, data: bytes) -> None:
        """Keep the end of output, which may come in pieces of any size."""
        self._recent = (self._recent + data[-_KEPT:])[-_KEPT:]

    @property
    def last_line(self) -> str:
        """The last line that isn't blank, or its end; empty before the first output."""
        return last_line(self._recent)


def last_line(data: bytes) -> str:
    """Return the last line of some output that isn't blank, or an empty string."""
    lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
