"""The launcher's own stdout and stderr; no other module writes to descriptors 1 and 2.

If both are the same open file (a terminal, ``2>&1``), they are one stream, so that their lines keep their order. A line
of the launcher never interrupts a line of a worker.
"""

from __future__ import annotations

import errno
import os

from elastic_run.multiprocessing.output.descriptors import STDERR, STDOUT, is_same_file
from elastic_run.multiprocessing.output.sink import open_sink
from elastic_run.multiprocessing.output.stream import Source, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.loop import Loop

#: Columns of a terminal that doesn't say how wide it is.
_COLUMNS = 80
_NAMES = {STDOUT: "standard output", STDERR: "standard error"}


class Launcher(Source):
    """The launcher itself as a source: it writes whole lines, so it never holds a stream."""


class Console:
    """Owner of descriptors 1 and 2."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._launcher = Launcher()
        self.is_shared = is_same_file(STDOUT, STDERR)
        stderr = self._open(STDERR)
        self._streams = {STDOUT: stderr if self.is_shared else self._open(STDOUT), STDERR: stderr}

    def _open(self, fd: int) -> Stream:
        sink = open_sink(fd, lambda error: self._tell_loss(fd, error))
        return Stream(self._loop, sink, lambda error: self._tell_closed(fd, error))

    def stream(self, fd: int) -> Stream:
        """Return the stream of descriptor 1 or 2, on which several sources take turns."""
        return self._streams[fd]

    def write(self, fd: int, data: bytes) -> None:
        """Write whole lines of the launcher's own, without ever blocking.

        It begins on a line of its own, after all that ended workers have left to say and, for a moment, after the
        line that another one is just writing.
        """
        if not data:
            return
        stream, launcher = self._streams[fd], self._launcher
        if stream.may_write(launcher):
            stream.write(launcher, data, starts_line=True)
        else:
            stream.wait(launcher, lambda: stream.write(launcher, data, starts_line=True))

    def say(self, text: str) -> None:
        """Write one line of the launcher to stderr."""
        self.write(STDERR, f"elastic-run: {text}\n".encode(errors="replace"))

    # --- a line that is rewritten ----------------------------------------------------------------------------------
    @property
    def has_live_line(self) -> bool:
        """Whether stderr is a terminal that can show a line in place of another."""
        return os.isatty(STDERR) and os.environ.get("TERM", "dumb") not in ("", "dumb")

    @property
    def is_in_background(self) -> bool:
        """Whether stderr is the terminal of our session, and another program has it now."""
        try:
            return os.tcgetpgrp(STDERR) != os.getpgrp()
        except OSError:
            return False  # no terminal, or not our session's

    @property
    def columns(self) -> int:
        """The columns that stderr's terminal has at the moment."""
        try:
            return os.get_terminal_size(STDERR).columns or _COLUMNS
        except OSError:
            return _COLUMNS

    def show_line(self, text: str) -> bool:
        """Show a line on stderr's terminal until something else is written there, or another one is shown.

        Returns:
            Whether it could be shown.
        """
        return self._streams[STDERR].show_line(text.encode(errors="replace"))

    def hide_line(self) -> None:
        """Take the line away that `show_line` has shown."""
        self._streams[STDERR].hide_line()

    @property
    def is_idle(self) -> bool:
        """Whether all is written, or nobody is left to read it."""
        return all(stream.is_idle for stream in self._streams.values())

    def close(self) -> None:
        """Give back the descriptors of our own; what is still queued is dropped."""
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.close()

    def _tell_closed(self, fd: int, error: OSError) -> None:
        reason = "" if error.errno == errno.EPIPE else f" ({error.strerror})"
        self._tell_other(fd, f"{_NAMES[fd]} has no reader any more{reason}: the job goes on without it")

    def _tell_loss(self, fd: int, error: OSError) -> None:
        self._tell_other(fd, f"{_NAMES[fd]}: {error.strerror}: output is missing there; the job goes on")

    def _tell_other(self, fd: int, text: str) -> None:
        if not self.is_shared:
            self.write(STDOUT + STDERR - fd, f"elastic-run: {text}\n".encode())
