"""The lines of one stream of a worker: from its pipe to its log file, to the tail for the report, and to the console.

Rules
- A channel reads its pipe while its turn on the console has come, or nobody's has. So a stuck console makes a worker
  wait at the full pipe, and the launcher's memory does not grow. If a log file has the bytes too, a `Backlog` remembers
  only their position, and reading goes on.
- Bytes that were read are never refused: pieces that can't be written at once wait in the channel for its turn.
- `Captured` writes every byte at once and unchanged. While other sources wait, it stops at the end of a line.
- `Teed` writes whole lines, many at once, each after the prefix. A line above the limit is written in parts under a
  single prefix while the channel holds the stream: so 100 MB without a newline cost no memory and are shown in one
  piece. If another source interrupts such a line (see `console`), it goes on under a new prefix.
- A progress bar ends its updates with a carriage return; until its newline it would be invisible for hours. So an
  unfinished line that contains a carriage return is shown as a line once a second. (torchrun makes a line of each
  update.)
- A prompt (`(Pdb) `) has no newline either. If a worker is silent after an unfinished line, the line is shown as a
  part. The rest follows on the same line if it comes within the wait limit for long lines, so that slow lines stay
  whole. A line that pauses a second time delays no other source. With a filter all lines stay whole, since a filter
  needs whole lines.
- The stream ends with an end of file (EIO on a pseudo-terminal whose last user has gone), or with `finish`. At `finish`
  the worker and all its descendants are dead, so the pipe holds the last bytes, even if a stray process has it open.
  Such a process gets EPIPE from then on.
"""

from __future__ import annotations

import os
from itertools import groupby

from elastic_run.multiprocessing.output.console import Source
from elastic_run.multiprocessing.output.sink import Backlog
from elastic_run.multiprocessing.wiring import MUTED, TEED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Stream
    from elastic_run.multiprocessing.output.fold import Block, Fold
    from elastic_run.multiprocessing.output.sink import FilteredCopy, LogFile
    from elastic_run.multiprocessing.output.tail import Activity, Tail
    from elastic_run.multiprocessing.wiring import Line

#: Bytes per read, also from a log file. More doesn't make it faster; it makes batches that stall the loop for longer.
READ_SIZE = 1 << 18
#: More than a pseudo-terminal or a pipe holds, also if the worker has enlarged it.
_CAPACITY = 1 << 24
#: Seconds that a worker has to go on with a line that it writes in several pieces, while others wait.
_WAIT_LIMIT = 0.005
#: The same, and for the whole line, where no person watches: on a busy machine a worker may get no processor for a
#: while between text and newline.
_WHOLE_LINE_WAIT = 0.25
#: The same for a line that is longer than the limit.
_LONG_LINE_WAIT = 1.0
_PROGRESS_INTERVAL = 1.0
#: Seconds of silence after which an unfinished line is shown.
_SILENCE = 0.1
_NEWLINE = 10


class Channel(Source):
    """The launcher's side of a stream: owns the reading end and the log file; subclasses cut pieces for the console."""

    def __init__(
        self, loop: Loop, stream: Stream, line: Line, activity: Activity, file: LogFile | None, tail: Tail | None
    ) -> None:
        super().__init__(stream)
        self.line = line
        self._loop = loop
        self._activity = activity
        self._file = file
        self._tail = tail
        #: What the console can't take yet, if the file has it.
        self._backlog: Backlog | None = None
        #: Stands before the console if equal lines of several ranks are shown once.
        self.folded: FoldedOutput | None = None
        #: Whether it waits for a turn to read.
        self._is_waiting = False
        loop.add_reader(line.reading, self._on_readable)

    @property
    def targets(self) -> list[int]:
        """Where its bytes go: descriptors of the console and of the log file."""
        return [self.line.fd] * (self.line.purpose != MUTED) + [self.line.file] * (self._file is not None)

    @property
    def has_more(self) -> bool:
        """See `Source.has_more`."""
        return self.is_behind or self._is_waiting

    @property
    def is_behind(self) -> bool:
        """Whether bytes are kept back that the console could not take at once."""
        return bool(self.pieces or self._backlog)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept back, and more may be written now."""
        return not self.is_behind and self.stream.may_write(self)

    @property
    def is_ready(self) -> bool:
        """Whether more may be read now without growing."""
        return self.is_clear or (self._backlog is not None and self._backlog.is_sound)

    def catch_up(self) -> None:
        """Take what is in the pipe, not what somebody goes on writing; harmless when it is closed."""
        left = _CAPACITY
        while not self.is_ended and left > 0 and (size := self._read()):
            left -= size

    def finish(self) -> None:
        """Take what is in the pipe, and close it; harmless when it is closed."""
        self.catch_up()
        self.end()

    def _on_readable(self) -> None:
        if self.is_ready:
            self._read()
        else:
            self._loop.remove_reader(self.line.reading)
            self._is_waiting = True
            self.stream.wait(self)

    def refill(self) -> None:
        """Read once, so that waiting channels take turns: first from the log file what the console couldn't take."""
        if self._backlog:
            if self.stream.is_closed:
                self._backlog.close()
            else:
                self.cut(self._backlog.take(READ_SIZE))
            if self.is_ended and not self._backlog:
                self.end_line()
        elif self._is_waiting:
            self._read()
            if not self.is_ended and self.is_ready:
                self._is_waiting = False
                self._loop.add_reader(self.line.reading, self._on_readable)

    def _read(self) -> int:
        """Read once; return how much there was."""
        try:
            data = os.read(self.line.reading, READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the pseudo-terminal has no user any more
        if not data:
            self.end()
            return 0
        self._activity.add(data, self._loop.now())
        if self._file is not None:
            self._file.write(data)
        if self._tail is not None:
            self._tail.add(data)
        if self.folded is None:
            self.add(data)
        else:
            self.folded.take(self, data)
        return len(data)

    def add(self, data: bytes, *, is_new: bool = True) -> None:
        """Show bytes now, or when the console has come so far; `is_new`: they are the last bytes of the log file."""
        if self._backlog is None or self.is_clear:
            self.cut(data)
            self.stream.offer(self)
        else:
            self._backlog.add(data, is_new=is_new)
            self.stream.wait(self)

    def end(self) -> None:
        """Close the pipe and the file; harmless when they are closed."""
        if self.is_ended:
            return
        self._loop.remove_reader(self.line.reading)
        os.close(self.line.reading)
        if self._file is not None:
            self._file.close()
        self._is_waiting = False
        if self.folded is not None:
            self.folded.end_channel(self)
        if not self._backlog:
            self.end_line()
        super().end()

    def cut(self, data: bytes) -> None:
        """Make pieces of the next bytes for the console."""
        self.pieces.append(data)

    def end_line(self) -> None:
        """Take the end of the bytes: none follow those that were cut."""


class Captured(Channel):
    """Gives bytes on unchanged and unbuffered.

    On a terminal a prompt or a progress bar must not hold the others up. Elsewhere lines stay whole if they take no
    longer than `_WHOLE_LINE_WAIT`.
    """

    wait_limit = _WAIT_LIMIT
    hold_limit = 1 << 20

    def __init__(
        self, loop: Loop, stream: Stream, line: Line, activity: Activity, file: LogFile | None, tail: Tail | None
    ) -> None:
        super().__init__(loop, stream, line, activity, file, tail)
        if not line.is_terminal:
            self.wait_limit = self.hold_time = _WHOLE_LINE_WAIT

    def write_piece(self) -> None:
        """Write the first piece, or its whole lines if others wait."""
        piece = self.pieces.pop(0)
        end = piece.rfind(b"\n") + 1
        if self.stream.is_contended and 0 < end < len(piece):
            self.pieces.insert(0, piece[end:])
            piece = piece[:end]
        self.stream.write(self, piece, starts_line=False)


class Teed(Channel):
    """Gives whole lines on, each after a prefix.

    `limit` is how many bytes a line may have before it is written in parts; `copy` gets the lines that a filter looks
    for. It is made of what is shown, and closed with the round, so a channel with a copy has no backlog.
    """

    wait_limit = _LONG_LINE_WAIT
    hold_limit = 1 << 28

    def __init__(  # noqa: PLR0913 - a stream has these ends
        self,
        loop: Loop,
        stream: Stream,
        line: Line,
        activity: Activity,
        file: LogFile | None,
        tail: Tail | None,
        *,
        prefix: bytes,
        limit: int,
        copy: FilteredCopy | None = None,
    ) -> None:
        super().__init__(loop, stream, line, activity, file, tail)
        self._backlog = None if file is None or copy is not None else Backlog(file)
        self._prefix = prefix.replace(b"\n", b" ")
        self._newline = b"\n" + self._prefix
        self._limit = limit
        self._copy = copy
        #: The line that is not finished, whether it has a carriage return, when its last bytes came, and whether it
        #: was shown because of a pause.
        self._partial = bytearray()
        self._is_progress = False
        self._fed_at = 0.0
        self._has_paused = False
        self._timer: Timer | None = None
        #: Whether the last piece that was written ended within a line.
        self._is_inside = False

    def end_line(self) -> None:
        """End the last line."""
        if self._timer is not None:
            self._timer.cancel()
        is_inside = self.pieces[-1][-1] != _NEWLINE if self.pieces else self._is_inside
        if self._partial or is_inside:
            self._make_piece(b"\n")
        if self._backlog is not None:
            self._backlog.close()

    def cut(self, data: bytes) -> None:
        """Make a piece of the lines that are complete; the rest waits for its end."""
        end = data.rfind(b"\n") + 1
        if end:
            self._make_piece(memoryview(data)[:end])
            self._is_progress = self._has_paused = False
            self.wait_limit = _LONG_LINE_WAIT
        rest = data[end:]
        self._partial += rest
        if not self._partial:
            return
        is_part = self._is_inside and self.stream.is_held_by(self)
        if is_part or len(self._partial) > self._limit:
            if self._has_paused:
                # A rank that prints a dot now and then would hold the others up for as long as it does so.
                self.wait_limit = _WAIT_LIMIT
            self._make_piece(b"")
            return
        self._fed_at = self._loop.now()
        self._is_progress = self._is_progress or b"\r" in rest
        if self._timer is None and (self._is_progress or self._copy is None):
            delay = _PROGRESS_INTERVAL if self._is_progress else _SILENCE
            self._timer = self._loop.call_later(delay, self._show_unfinished)

    def _show_unfinished(self) -> None:
        """Show a progress bar up to its last update, or a line after which nothing has come for a while."""
        self._timer = None
        end = self._partial.rfind(b"\r") + 1
        if self._is_progress and end:
            rest = self._partial[end:]
            self._partial = self._partial[: end - 1].replace(b"\r", b"\r" + self._prefix)
            self._make_piece(b"\r\n")
            self._partial = rest
        elif self._is_progress or not self._partial or self._copy is not None or self._backlog:
            return
        elif self._loop.now() < self._fed_at + _SILENCE:
            self._timer = self._loop.call_at(self._fed_at + _SILENCE, self._show_unfinished)
        else:
            self._has_paused = True
            self._make_piece(b"")
        self.stream.offer(self)

    def _make_piece(self, data: bytes | memoryview) -> None:
        """Make a piece of the unfinished line and what follows it."""
        piece = b"".join((self._partial, data))
        self._partial = bytearray()
        if self._copy is not None:
            self._copy.add(self._prefix, piece)
        self.pieces.append(piece)

    def write_piece(self) -> None:
        """Write the first piece, with a prefix before each line that begins in it."""
        piece = self.pieces.pop(0)
        is_new = not (self._is_inside and self.stream.is_held_by(self))
        if self._is_inside and is_new and piece[0] == _NEWLINE:
            piece = piece[1:]  # the source that broke the long line has ended it
        self._is_inside = bool(piece) and piece[-1] != _NEWLINE
        if piece:
            text = memoryview(b"".join((self._prefix if is_new else b"", piece.replace(b"\n", self._newline))))
            end = len(text) if self._is_inside else len(text) - len(self._prefix)
            self.stream.write(self, text[:end], starts_line=is_new)


class FoldedOutput(Source):
    """Acts for a `Fold`: stands between the channels of a round's stderr and the console; `channels` are by rank.

    Lines that can't be shown at once, since the console is behind or another worker is within a line, are not folded:
    each channel shows its own.
    """

    def __init__(self, loop: Loop, stream: Stream, channels: Mapping[int, Channel]) -> None:
        super().__init__(stream)
        self._loop = loop
        self.channels = channels
        self._ranks = {channel: rank for rank, channel in channels.items()}
        self._made: Fold | None = None
        self._has_prefixes = any(channel.line.purpose == TEED for channel in channels.values())
        self._timer: Timer | None = None
        self._timer_at = 0.0
        stream.flush_held = self.flush
        for channel in channels.values():
            channel.folded = self

    @property
    def _fold(self) -> Fold:
        if self._made is None:
            # `fold` imports the module `re`, which takes milliseconds. Lines of stdout need neither, and do not wait.
            from elastic_run.multiprocessing.output.fold import Fold

            self._made = Fold(self.channels)
        return self._made

    def take(self, channel: Channel, data: bytes) -> None:
        """Take the next bytes of a channel."""
        if channel.is_behind:
            if held := self._fold.leave(self._ranks[channel], data):
                channel.add(held, is_new=False)
            channel.add(data)
        else:
            self._act(self._fold.add(self._loop.now(), self._ranks[channel], data))

    def end_channel(self, channel: Channel) -> None:
        """Take the end of a channel's bytes; its held lines may still be shown."""
        if self._made is not None:
            self._act(self._made.end(self._ranks[channel]))

    def flush(self) -> None:
        """Show all that is held."""
        if self._made is not None:
            self._act(self._made.flush())

    def close(self) -> None:
        """Show all that is held, and end."""
        self.flush()
        self.stream.flush_held = None

    def _expire(self) -> None:
        self._timer = None
        self._act(self._fold.expire(self._loop.now()))

    def _act(self, blocks: list[Block]) -> None:
        from elastic_run.multiprocessing.output.fold import put_label

        for ranks, group in groupby(blocks, lambda block: sorted(block.raws)):
            same = [*group]
            is_behind = any(self.channels[rank].is_behind for rank in ranks)
            if len(ranks) > 1 and not is_behind and self.stream.may_write(self):
                self.add(put_label(ranks, [block.text for block in same], is_each_line=self._has_prefixes))
            else:
                for rank in ranks:
                    self.channels[rank].add(b"".join([block.raws[rank] for block in same]), is_new=False)
        self._plan()

    def _plan(self) -> None:
        """Set the timer while something is held."""
        from elastic_run.multiprocessing.output.fold import SETTLE

        if self._fold.is_empty:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._timer_at > self._loop.now() + SETTLE:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = self._fold.deadline
            self._timer = self._loop.call_at(self._timer_at, self._expire)
