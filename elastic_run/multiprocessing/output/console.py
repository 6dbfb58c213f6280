"""The launcher's own stdout and stderr: many sources, two descriptors, whole lines.

Rules
- No other module writes to descriptors 1 and 2. If both are the same open file (a terminal, ``2>&1``), they are one
  stream, so that their lines keep their order. A line of the launcher never interrupts a line of a worker.
- Nothing blocks. Bytes that the descriptor does not take at once are queued. Above `QUEUE_LIMIT` the sources are told
  to wait. Then they stop reading, and their workers block, as they would on a terminal: so memory is bounded.
- A source that has written a part of a line *holds* the stream until the line's end, and other sources wait. Otherwise
  two workers whose `print` makes two writes, text and newline, would mix. The hold ends early if the source has written
  nothing for its `wait_limit` although the descriptor took everything, or if its line takes longer than its `hold_time`
  or is longer than its `hold_limit`: a progress bar, a prompt, or an endless line must not silence the other sources.
- Sources wait in a queue. A source whose worker has ended goes to the front, so that its last lines come before the
  launcher's line about its death.
- On a terminal there may be a live line below all other lines. It is removed before anything else is written. The
  cursor waits at its beginning, so that it can be erased even after a narrower window has wrapped it into several rows.
- If the reader is gone (EPIPE, a hung-up terminal), the stream is closed: further data is dropped, and the user is told
  once.
"""

from __future__ import annotations

import errno
import os

from elastic_run.multiprocessing.output.sink import open_sink
from elastic_run.multiprocessing.output.wiring import STDERR, STDOUT, is_same_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.sink import Sink

#: Queued bytes above which sources wait, and below which they go on.
QUEUE_LIMIT = 1 << 20
_QUEUE_LOW = QUEUE_LIMIT // 2
#: Pieces smaller than this are gathered into blocks of `_BLOCK`, so that a queue of short lines is a small one.
_SMALL = 4096
_BLOCK = 1 << 16
_NEWLINE = 10
#: To the line's beginning; erase from the cursor to the end of the screen.
_RETURN = b"\r"
_ERASE = b"\x1b[J"
#: Columns of a terminal that doesn't say how wide it is.
_COLUMNS = 80
_NAMES = {STDOUT: "standard output", STDERR: "standard error"}


class Console:
    """Owner of descriptors 1 and 2."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        #: The launcher writes whole lines, so as a source it never holds a stream.
        self._launcher = Source()
        self.is_shared = is_same_file(STDOUT, STDERR)
        stderr = self._open(STDERR)
        try:
            self._streams = {STDOUT: stderr if self.is_shared else self._open(STDOUT), STDERR: stderr}
        except OSError:
            stderr.close()
            raise

    def _open(self, fd: int) -> Stream:
        sink = open_sink(fd, lambda error: self._report_loss(fd, error))
        return Stream(self._loop, sink, lambda error: self._report_closed(fd, error))

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
        """Show a line on stderr's terminal until something else is written there; return whether it could be shown."""
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

    def _report_closed(self, fd: int, error: OSError) -> None:
        reason = "" if error.errno == errno.EPIPE else f" ({error.strerror})"
        self._say_on_other(fd, f"{_NAMES[fd]} has no reader any more{reason}: the job goes on without it")

    def _report_loss(self, fd: int, error: OSError) -> None:
        self._say_on_other(fd, f"{_NAMES[fd]}: {error.strerror}: output is missing there; the job goes on")

    def _say_on_other(self, fd: int, text: str) -> None:
        if not self.is_shared:
            self.write(STDOUT + STDERR - fd, f"elastic-run: {text}\n".encode())


class Source:
    """A writer of a stream."""

    #: Seconds of silence within a line after which others may write.
    wait_limit = 0.0
    #: Seconds that a single line may take before others may write.
    hold_time = float("inf")
    #: Bytes of a single line after which others may write.
    hold_limit = 0


class Stream:
    """The queue and the order of one descriptor of the console."""

    def __init__(self, loop: Loop, sink: Sink, on_closed: Callable[[OSError], None]) -> None:
        self._loop = loop
        self._sink = sink
        self._on_closed = on_closed
        self._queue: list[bytes | bytearray | memoryview] = []
        self._queued = 0
        self._waiting: list[tuple[Source, Callable[[], None]]] = []
        self._holder: Source | None = None
        self._held_since = 0.0
        self._held_at = 0.0
        self._held_bytes = 0
        self._served: Source | None = None
        self._is_mid_line = False
        self._is_service_due = False
        self._timer: Timer | None = None
        self._has_live_line = False
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether sources have to wait because the descriptor is slow."""
        return self._queued >= QUEUE_LIMIT

    @property
    def is_idle(self) -> bool:
        """Whether all data is written, and no source waits."""
        return not self._queued and not self._waiting

    @property
    def is_contended(self) -> bool:
        """Whether a source waits until the present writer comes to the end of a line."""
        return bool(self._waiting)

    def is_held_by(self, source: Source) -> bool:
        """Whether a source is within a line."""
        return self._holder is source

    def may_write(self, source: Source) -> bool:
        """Whether it is a source's turn."""
        if self.is_closed:
            return True
        if self.is_full:
            return False
        holder = self._holder
        if holder is source or source is self._served:
            return True
        return not self._waiting and (holder is None or self._is_overdue(holder))

    def _is_overdue(self, holder: Source) -> bool:
        if self._held_bytes > holder.hold_limit:
            return True
        return not self._queued and self._loop.now() >= self._hold_ends(holder)

    def _hold_ends(self, holder: Source) -> float:
        return min(self._held_at + holder.wait_limit, self._held_since + holder.hold_time)

    def write(self, source: Source, data: bytes | memoryview, *, starts_line: bool) -> None:
        """Write, or queue, data that is not empty; the caller has asked `may_write`.

        The source holds the stream if the data ends within a line. `starts_line` says that the data must be at the
        beginning of a line: an unfinished line of another source is ended first.
        """
        if self.is_closed:
            return
        self.hide_line()
        is_holder = self._holder is source
        if starts_line and self._is_mid_line and not is_holder:
            self._put(b"\n")
        self._put(data)
        if data[-1] == _NEWLINE:
            self._is_mid_line = False
            self._holder = None
            if self._waiting:
                self._served = None  # a turn is over with the line
                self._serve_soon()
        else:
            self._is_mid_line = True
            self._held_at = self._loop.now()
            self._held_bytes = self._held_bytes + len(data) if is_holder else len(data)
            if not is_holder or (isinstance(data, bytes) and b"\n" in data):  # another line has begun
                self._held_since = self._held_at
            self._holder = source
            if self._waiting and self._held_bytes > source.hold_limit:
                self._serve_soon()

    def release(self, source: Source) -> None:
        """End a source's hold, also within a line."""
        if self._holder is source:
            self._holder = None
            if self._waiting:
                self._serve_soon()

    def wait(self, source: Source, callback: Callable[[], None], *, is_first: bool = False) -> None:
        """Call a source back once, when it is its turn: `may_write` is true for it then."""
        if is_first:
            self._waiting.insert(0, (source, callback))
        else:
            self._waiting.append((source, callback))
        self._provide_service()

    def _put(self, data: bytes | memoryview) -> None:
        if self.is_closed:
            return
        if self._queue:
            self._enqueue(data)
            return
        done = self._write(data)
        if done < len(data) and not self.is_closed:
            self._enqueue(memoryview(data)[done:])
            self._loop.add_writer(self._sink.fd, self._drain)

    def _enqueue(self, data: bytes | memoryview) -> None:
        self._queued += len(data)
        last = self._queue[-1] if self._queue else None
        if isinstance(last, bytearray) and len(data) < _SMALL and len(last) < _BLOCK:
            last += data
        else:
            self._queue.append(bytearray(data) if len(data) < _SMALL else data)

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._sink.write(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._end(error)
            return 0

    def _drain(self) -> None:
        while self._queue:
            first = self._queue[0]
            done = self._write(first)
            if self.is_closed:
                return
            self._queued -= done
            if done < len(first):
                self._queue[0] = memoryview(first)[done:]
                break
            del self._queue[0]
        if not self._queue:
            self._held_at = self._held_since = self._loop.now()  # it is silent only from now on
            self._loop.remove_writer(self._sink.fd)
        if self._waiting and self._queued <= _QUEUE_LOW:
            self._serve()

    def _end(self, error: OSError) -> None:
        self._drop()
        self._on_closed(error)

    def _drop(self) -> None:
        self.is_closed = True
        self._queue.clear()
        self._queued = 0
        self._holder = None
        self._loop.remove_writer(self._sink.fd)
        if self._waiting:
            self._serve_soon()

    def close(self) -> None:
        """Drop the queue and give the descriptor back; the waiting sources are called."""
        self._drop()
        while self._waiting:
            self._waiting.pop(0)[1]()
        self._sink.close()

    def show_line(self, data: bytes) -> bool:
        """Show a line that fits the terminal until something else is written, in place of the live line before.

        Returns whether it could be shown: not within a line of a source, and not if the terminal takes nothing now.
        """
        if self.is_closed or self._is_mid_line or self._queue or self._waiting:
            return False
        self._put(_RETURN + data + _ERASE + _RETURN)
        self._has_live_line = True
        return True

    def hide_line(self) -> None:
        """Remove the live line, if there is one."""
        if self._has_live_line:
            self._has_live_line = False
            self._put(_RETURN + _ERASE)

    def _serve_soon(self) -> None:
        if not self._is_service_due:
            self._is_service_due = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        """Call the waiting sources in their order, once each, as long as a source may write."""
        self._is_service_due = False
        for _ in range(len(self._waiting)):
            if (turn := self._next_turn()) is None:
                break
            source, callback = self._waiting[turn]
            del self._waiting[turn]
            self._served = source
            try:
                callback()
            finally:
                self._served = None
        if self._waiting:
            self._provide_service()

    def _next_turn(self) -> int | None:
        if not self._waiting or (self.is_full and not self.is_closed):
            return None
        holder = self._holder
        if holder is None or self._is_overdue(holder):
            self._holder = None
            return 0
        return next((index for index, (source, _) in enumerate(self._waiting) if source is holder), None)

    def _provide_service(self) -> None:
        """Make sure that the waiting sources are called: by the drain, by a timer, or in the next turn of the loop."""
        if self.is_full and not self.is_closed:
            return
        holder = self._holder
        if holder is None or self._is_overdue(holder) or any(source is holder for source, _ in self._waiting):
            self._serve_soon()
        elif not self._queued and self._timer is None:
            self._timer = self._loop.call_at(self._hold_ends(holder), self._look_at_holder)

    def _look_at_holder(self) -> None:
        self._timer = None
        if self._waiting:
            self._serve()
