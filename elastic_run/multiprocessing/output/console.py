"""The launcher's own stdout and stderr: many sources, two descriptors, whole lines.

Rules
- No other module writes to descriptors 1 and 2. If both are the same open file (a terminal, ``2>&1``), they are one
  stream, so that their lines keep their order. A line of the launcher never interrupts a line of a worker.
- Nothing blocks. Bytes that the descriptor does not take at once are queued. Above `QUEUE_LIMIT` the sources wait: they
  stop reading, and their workers block, as they would on a terminal. So memory is bounded.
- A source that has written a part of a line *holds* the stream until the line's end, and other sources wait. Otherwise
  two workers whose `print` makes two writes, text and newline, would mix. The hold ends early if the source has written
  nothing for its `wait_limit` although the descriptor took everything, or if its line takes longer than its `hold_time`
  or is longer than its `hold_limit`: a progress bar, a prompt, or an endless line must not silence the other sources.
- Sources wait in a queue, and a turn lasts up to the end of a line. A source whose worker has ended goes to the front,
  so that its last lines come before the launcher's line about its death.
- On a terminal there may be a live line below all other lines. It is removed before anything else is written. The
  cursor waits at its beginning, so that it can be erased even after a narrower window has wrapped it into several rows.
- If the reader is gone (EPIPE, a hung-up terminal), the stream is closed: further data is dropped, and the user is told
  once.
"""

from __future__ import annotations

import errno
import os

from elastic_run.multiprocessing.output.sink import Sink, open_sink
from elastic_run.multiprocessing.wiring import STDERR, STDOUT, is_same_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop, Timer

#: Queued bytes above which sources wait, and below which they go on.
QUEUE_LIMIT = 1 << 20
_QUEUE_LOW = QUEUE_LIMIT // 2
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
        self.is_shared = is_same_file(STDOUT, STDERR)
        stderr = self._open(STDERR)
        try:
            self._streams = {STDOUT: stderr if self.is_shared else self._open(STDOUT), STDERR: stderr}
        except OSError:
            stderr.close()
            raise
        self._launcher = {fd: Source(stream) for fd, stream in self._streams.items()}
        #: Takes what is not shown.
        self.nowhere = Stream(loop, Sink(-1), lambda _: None)
        self.nowhere.is_closed = True

    def _open(self, fd: int) -> Stream:
        sink = open_sink(fd, lambda error: self._report_loss(fd, error))
        return Stream(self._loop, sink, lambda error: self._report_closed(fd, error))

    def stream(self, fd: int) -> Stream:
        """Return the stream of descriptor 1 or 2, on which several sources take turns."""
        return self._streams[fd]

    def write(self, fd: int, data: bytes) -> None:
        """Write whole lines of the launcher's own, without ever blocking.

        They begin on a line of their own, after all that ended workers have left to say and, for a moment, after the
        line that another worker is just writing.
        """
        if (flush_held := self._streams[fd].flush_held) is not None:
            flush_held()
        if data:
            self._launcher[fd].add(data)

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
        for stream in {*self._streams.values()}:
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
    """A writer of a stream. This class writes whole lines, the launcher's; `worker_lines` has those for a worker's.

    Its pieces wait here until the stream gives it a turn. A source without pieces may wait for a turn, too: only then
    its worker's pipe is read, so that not all workers fill the launcher's memory at once.
    """

    #: Seconds of silence within a line after which others may write.
    wait_limit = 0.0
    #: Seconds that a single line may take before others may write.
    hold_time = float("inf")
    #: Bytes of a single line after which others may write.
    hold_limit = 0

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.pieces: list[bytes] = []
        #: Whether its worker has ended, so that nothing more follows.
        self.is_ended = False

    @property
    def has_more(self) -> bool:
        """Whether it needs another turn."""
        return bool(self.pieces)

    def add(self, data: bytes) -> None:
        """Accept the next bytes; never fails, never blocks."""
        self.pieces.append(data)
        self.stream.offer(self)

    def end(self) -> None:
        """Take the end of the bytes: no more will come."""
        self.is_ended = True
        self.stream.offer(self)

    def refill(self) -> None:
        """Get more to write; called once in a turn, if there is nothing, so that sources take turns."""

    def write_piece(self) -> None:
        """Write the first of the pieces."""
        self.stream.write(self, self.pieces.pop(0), starts_line=True)


class Stream:
    """The queue and the order of one descriptor of the console."""

    def __init__(self, loop: Loop, sink: Sink, on_closed: Callable[[OSError], None]) -> None:
        self._loop = loop
        self._sink = sink
        self._on_closed = on_closed
        self._queue = bytearray()
        #: The sources that wait for a turn, and the source that has it.
        self._waiting: list[Source] = []
        self._served: Source | None = None
        self._holder: Source | None = None
        self._held_since = 0.0
        self._held_at = 0.0
        self._held_bytes = 0
        self._is_mid_line = False
        self._is_service_due = False
        self._timer: Timer | None = None
        self._has_live_line = False
        #: Shows the lines of workers that are held, before a line of the launcher.
        self.flush_held: Callable[[], None] | None = None
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether sources have to wait because the descriptor is slow."""
        return len(self._queue) >= QUEUE_LIMIT

    @property
    def is_idle(self) -> bool:
        """Whether all data is written, and no source waits."""
        return not self._queue and not self._waiting

    @property
    def is_contended(self) -> bool:
        """Whether a source waits until the present writer comes to the end of a line."""
        return bool(self._waiting)

    def is_held_by(self, source: Source) -> bool:
        """Whether a source is within a line."""
        return self._holder is source

    # --- whose turn it is --------------------------------------------------------------------------------------------
    def may_write(self, source: Source) -> bool:
        """Whether it is a source's turn, or nobody's."""
        if self.is_closed:
            return True
        if self.is_full:
            return False
        holder = self._holder
        if holder is source or source is self._served:
            return True
        return not self._waiting and (holder is None or self._is_overdue(holder))

    def offer(self, source: Source) -> None:
        """Let a source write what it has, now or when it is its turn."""
        if source is self._served:
            return  # its turn goes on
        if not self.may_write(source):
            self.wait(source)
            return
        self._give_turn(source)
        self._plan()

    def wait(self, source: Source) -> None:
        """Give a source a turn later."""
        if source in self._waiting:
            if not source.is_ended:
                return
            self._waiting.remove(source)
        self._waiting.insert(0 if source.is_ended else len(self._waiting), source)
        self._plan()

    def _give_turn(self, source: Source) -> None:
        if source in self._waiting:
            self._waiting.remove(source)
        before, self._served = self._served, source
        try:
            if not source.pieces:
                source.refill()
            while source.pieces and not self.is_full:
                source.write_piece()
                if self._waiting and self._holder is not source:
                    break  # a turn is over with the line
        finally:
            self._served = before
        if source.has_more:
            self.wait(source)
        elif source.is_ended and self._holder is source:
            self._holder = None

    def _plan(self) -> None:
        """Make sure that the waiting sources get turns: in the next turn of the loop, by a timer, or by the drain."""
        if not self._waiting or self.is_full:
            return
        holder = self._holder
        if holder is None or holder in self._waiting or self._is_overdue(holder):
            if not self._is_service_due:
                self._is_service_due = True
                self._loop.call_soon(self._serve)
        elif not self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._hold_ends(holder), self._on_hold_ended)

    def _on_hold_ended(self) -> None:
        self._timer = None
        self._serve()

    def _serve(self) -> None:
        """Give the waiting sources a turn each, as long as a source may write."""
        self._is_service_due = False
        for _ in range(len(self._waiting)):
            if not self._waiting or self.is_full:
                break
            holder = self._holder
            if holder is None or self._is_overdue(holder):
                self._holder = None
                self._give_turn(self._waiting[0])
            elif holder in self._waiting:
                self._give_turn(holder)
            else:
                break
        self._plan()

    def _is_overdue(self, holder: Source) -> bool:
        if self._held_bytes > holder.hold_limit:
            return True
        return not self._queue and self._loop.now() >= self._hold_ends(holder)

    def _hold_ends(self, holder: Source) -> float:
        return min(self._held_at + holder.wait_limit, self._held_since + holder.hold_time)

    # --- writing -----------------------------------------------------------------------------------------------------
    def write(self, source: Source, data: bytes | memoryview, *, starts_line: bool) -> None:
        """Write, or queue, data that is not empty, in a turn of the source.

        The source holds the stream if the data ends within a line. `starts_line` says that the data must be at the
        beginning of a line: an unfinished line of another source is ended first.
        """
        if self.is_closed:
            return
        self.hide_line()
        is_holder = self._holder is source
        if starts_line and self._is_mid_line and not is_holder:
            self._put(b"\n")
        self._is_mid_line = data[-1] != _NEWLINE
        if self._is_mid_line:
            self._held_at = self._loop.now()
            self._held_bytes = self._held_bytes + len(data) if is_holder else len(data)
            if not is_holder or (isinstance(data, bytes) and b"\n" in data):  # another line has begun
                self._held_since = self._held_at
        is_too_long = self._waiting and self._held_bytes > source.hold_limit
        self._holder = source if self._is_mid_line and not is_too_long else None
        self._put(data)

    def _put(self, data: bytes | memoryview) -> None:
        if self.is_closed:
            return
        if not self._queue:
            done = self._write(data)
            if done == len(data) or self.is_closed:
                return
            data = memoryview(data)[done:]
            self._loop.add_writer(self._sink.fd, self._drain)
        self._queue += data

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._sink.write(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._drop()
            self._on_closed(error)
            return 0

    def _drain(self) -> None:
        del self._queue[: self._write(self._queue)]
        if not self._queue:
            self._held_at = self._held_since = self._loop.now()  # it is silent only from now on
            self._loop.remove_writer(self._sink.fd)
        if len(self._queue) <= _QUEUE_LOW:
            self._serve()

    def _drop(self) -> None:
        self.is_closed = True
        self._queue = bytearray()
        self._holder = None
        self._loop.remove_writer(self._sink.fd)
        self._plan()

    def close(self) -> None:
        """Drop the queue and give the descriptor back; the waiting sources get their turns, and write to nowhere."""
        self._drop()
        while self._waiting:
            self._serve()
        self._sink.close()

    # --- the live line -----------------------------------------------------------------------------------------------
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
