"""How a worker's bytes get to the console: unchanged, or as whole lines with a prefix; and what is shown only once.

Rules
- A source accepts all bytes that were read. It keeps the bytes that it can't write at once, and is not `is_ready` while
  it has any: so a stuck console makes a worker wait, and the launcher's memory does not grow. If a log file has the
  bytes too, a `Backlog` remembers only their position, and reading goes on.
- `PassThrough` writes every byte at once and unchanged. While other sources wait, it stops at the end of a line.
- `Lines` writes whole lines, many at once, each after the prefix. A line above the limit is written in parts under a
  single prefix while the source holds the stream: so 100 MB without a newline cost no memory and are shown in one
  piece. If another source interrupts such a line (see `console`), it goes on under a new prefix.
- A progress bar ends its updates with a carriage return; until its newline it would be invisible for hours. So an
  unfinished line that contains a carriage return is shown as a line once a second. (torchrun makes a line of each
  update.) If its newline is the next byte, that line has ended already.
- A prompt (`(Pdb) `) has no newline either. If a worker is silent after an unfinished line, the line is shown as a
  part. The rest follows on the same line if it comes within the wait limit for long lines, so that slow lines stay
  whole. A line that pauses a second time delays no other source. With a filter all lines stay whole, since a filter
  needs whole lines.
- `InterruptFold` stands before the sources of all workers and leaves out what another worker has shown. Log files and
  the tail for the report get every byte, from the channel.
"""

from __future__ import annotations

from elastic_run.multiprocessing.output.console import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Stream
    from elastic_run.multiprocessing.output.sink import Backlog, LogFile

#: Seconds that a worker has to go on with a line that it writes in several pieces, while others wait.
_WAIT_LIMIT = 0.005
#: The same, and for the whole line, where no person watches: on a busy machine a worker may get no processor for a
#: while between text and newline.
_WHOLE_LINE_WAIT = 0.25
#: The same for a line that is longer than the limit.
_LONG_LINE_WAIT = 1.0
#: Bytes that are read back from a log file at once.
_REFILL = 1 << 18
_PROGRESS_INTERVAL = 1.0
#: Seconds of silence after which an unfinished line is shown.
_SILENCE = 0.1
_NEWLINE = 10


class PassThrough(Source):
    """Gives bytes on unchanged and unbuffered.

    `is_watched` says that it is a terminal, where a prompt or a progress bar must not hold the others up. Otherwise
    lines stay whole if they take no longer than `_WHOLE_LINE_WAIT`.
    """

    wait_limit = _WAIT_LIMIT
    hold_limit = 1 << 20

    def __init__(self, stream: Stream, *, is_watched: bool = True) -> None:
        super().__init__(stream)
        if not is_watched:
            self.wait_limit = self.hold_time = _WHOLE_LINE_WAIT

    def write_piece(self) -> None:
        """Write the first piece, or its whole lines if others wait."""
        piece = self.pieces.pop(0)
        end = piece.rfind(b"\n") + 1
        if self.stream.is_contended and 0 < end < len(piece):
            self.pieces.insert(0, piece[end:])
            piece = piece[:end]
        self.stream.write(self, piece, starts_line=False)


class Lines(Source):
    """Gives whole lines on, each after a prefix.

    `limit` is how many bytes a line may have before it is written in parts; `copy` gets the lines that a filter looks
    for; `backlog` remembers what the console can't take yet.
    """

    wait_limit = _LONG_LINE_WAIT
    hold_limit = 1 << 28

    def __init__(
        self,
        loop: Loop,
        stream: Stream,
        prefix: bytes,
        *,
        limit: int,
        copy: FilteredCopy | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        super().__init__(stream)
        self._loop = loop
        self._prefix = prefix.replace(b"\n", b" ")
        self._newline = b"\n" + self._prefix
        self._limit = limit
        self._copy = copy
        self._backlog = backlog
        #: The line that is not finished, whether it has a carriage return, when its last bytes came, and whether it
        #: was shown because of a pause.
        self._partial = bytearray()
        self._is_progress = False
        self._fed_at = 0.0
        self._has_paused = False
        self._timer: Timer | None = None
        #: Whether the last piece given to the stream ended within a line, and whether the last one made does.
        self._is_inside = False
        self._is_part_made = False
        self._is_progress_shown = False

    @property
    def has_more(self) -> bool:
        """See `Source.has_more`."""
        return bool(self._backlog) or super().has_more

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept back, also in the log file, and more may be written now."""
        return not self._backlog and super().is_clear

    @property
    def is_ready(self) -> bool:
        """See `Source.is_ready`."""
        return self.is_clear or (self._backlog is not None and self._backlog.is_sound)

    def add(self, data: bytes) -> None:
        """Show bytes now, or when the console has come so far."""
        if self._backlog is None or self.is_clear:
            self._split(data)
            self.stream.offer(self)
        else:
            self._backlog.add(data)
            self.stream.wait(self)

    def refill(self) -> None:
        """Read what the console could not take before from the log file."""
        if not self._backlog:
            super().refill()
            return
        if self.stream.is_closed:
            self._backlog.close()
        else:
            self._split(self._backlog.take(_REFILL))
        if self.is_ended and not self._backlog:
            self._end_line()

    def end(self) -> None:
        """End the last line."""
        if not self._backlog:
            self._end_line()
        super().end()

    def _end_line(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._partial or self._is_part_made:
            self._make_piece(b"\n")
        if self._backlog is not None:
            self._backlog.close()

    def _split(self, data: bytes) -> None:
        """Make a piece of the lines that are complete; the rest waits for its end."""
        if self._is_progress_shown and data:
            self._is_progress_shown = False
            data = data.removeprefix(b"\n")
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
            self._is_progress_shown = not rest
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
        self._is_part_made = piece[-1] != _NEWLINE
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


class FilteredCopy:
    """A file of --duplicate-stdout-filters or --duplicate-stderr-filters: lines of all tee'd ranks that hold a text.

    Each line stands after its rank's prefix. Of a line longer than the limit of tee'd lines each part counts as a line.
    """

    def __init__(self, file: LogFile, filters: Iterable[str]) -> None:
        self._file = file
        self._needles = tuple(text.encode("utf-8", "surrogateescape") for text in filters)

    def add(self, prefix: bytes, piece: bytes) -> None:
        """Look through the next lines of a source."""
        if self._has_any(piece):  # of most pieces no line is wanted
            lines = piece.removesuffix(b"\n").split(b"\n")
            self._file.write(b"".join([prefix + line + b"\n" for line in lines if self._has_any(line)]))

    def _has_any(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# --- what is shown once -----------------------------------------------------------------------------------------------
#: Seconds and bytes of a traceback that is held back: Python writes it line by line, and reads the program's files.
_HOLD = 0.5
_MOST_HELD = 1 << 16
_FIRST_LINE = b"Traceback (most recent call last):\n"
_FRAMES = rb"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)*"
_LINK = (
    rb"\n(?:During handling of the above exception, another exception occurred"
    rb"|The above exception was the direct cause of the following exception):\n\n"
)
#: A chain of tracebacks of which the last one, and perhaps others, is a KeyboardInterrupt. Python 3.13 writes colours.
_INTERRUPT = rb"(?:%b\S[^\n]*\n%b)*%b(?:\x1b\[[\d;]*m)?KeyboardInterrupt\b[^\n]*\n(?!%b)" % (
    _FRAMES,
    _LINK,
    _FRAMES,
    _LINK,
)
_PLACE = rb'File "(?:\x1b\[[\d;]*m)?([^"\x1b]*)[^\n]*? line (?:\x1b\[[\d;]*m)?(\d+)'


class InterruptFold:
    """The equal KeyboardInterrupts of the workers of one round, shown once on the console after Ctrl-C.

    It exists only since SIGINT was sent to the workers. From the first line of a traceback on, a source is held for a
    moment or until its end. All bytes but the tracebacks that are left out are shown, in their order.
    """

    def __init__(self, loop: Loop, ranks: Mapping[Source, int]) -> None:
        import re

        self._loop = loop
        self._ranks = ranks
        #: A traceback that may be left out, and the end of its time.
        self._held: dict[Source, tuple[bytearray, Timer]] = {}
        #: The ranks that have written each traceback.
        self._written: dict[bytes, list[int]] = {}
        self._interrupt, self._place = re.compile(_INTERRUPT), re.compile(_PLACE)

    def add(self, source: Source, data: bytes) -> None:
        """Give a worker's bytes to its source, now or when it is clear what they are."""
        if source in self._held:
            start = 0
        else:
            start = data.find(_FIRST_LINE)
            # A backlog counts the bytes of the log file, which has every byte.
            if start < 0 or not source.is_clear:
                source.add(data)
                return
            if start:
                source.add(data[:start])
            self._held[source] = bytearray(), self._loop.call_later(_HOLD, lambda: self.release(source))
        held = self._held[source][0]
        held += data[start:]
        if len(held) > _MOST_HELD:
            self.release(source)

    def release(self, source: Source) -> None:
        """Let a source have what is held back, but for what another worker has shown."""
        if source not in self._held:
            return
        held, timer = self._held.pop(source)
        timer.cancel()
        text, rank = bytes(held), self._ranks[source]
        if source.is_clear:
            text = self._interrupt.sub(lambda found: found[0] if self._is_first(found[0], rank) else b"", text)
        if text:
            source.add(text)

    def _is_first(self, text: bytes, rank: int) -> bool:
        ranks = self._written.setdefault(text, [])
        if rank not in ranks:
            ranks.append(rank)
        return ranks[0] == rank

    def list_folded(self) -> list[tuple[str, list[int]]]:
        """Return the place (`train.py:88`) of each traceback that was shown once for several workers, and the ranks."""
        return [(self._name_place(text), sorted(ranks)) for text, ranks in self._written.items() if len(ranks) > 1]

    def _name_place(self, text: bytes) -> str:
        """Return the innermost frame, or ""."""
        places = self._place.findall(text)
        return f"{places[-1][0].decode(errors='replace').rpartition('/')[2]}:{places[-1][1].decode()}" if places else ""
