"""How a worker's bytes get to the console: unchanged, or as whole lines with a prefix.

Rules
- An outlet accepts all bytes that were read. It keeps the bytes that it can't write at once, and is not `is_ready`
  while it has any: so a stuck console makes a worker wait, and the launcher's memory does not grow. If a log file has
  the bytes too, a `Backlog` remembers only their position, and reading goes on.
- `PassThrough` writes every byte at once and unchanged. While other sources wait, it stops at the end of a line.
- `Lines` writes whole lines, many at once, each after the prefix. A line above the limit is written in parts under a
  single prefix while the outlet holds the stream: so 100 MB without a newline cost no memory and are shown in one
  piece. If another source interrupts such a line (see `console`), it goes on under a new prefix.
- A progress bar ends its updates with a carriage return; until its newline it would be invisible for hours. So an
  unfinished line that contains a carriage return is shown as a line once a second. (torchrun makes a line of each
  update.) If its newline is the next byte, that line has ended already.
- A prompt (`(Pdb) `) has no newline either. If a worker is silent after an unfinished line, the line is shown as a
  part. The rest follows on the same line if it comes within the wait limit for long lines, so that slow lines stay
  whole. A line that pauses a second time delays no other source. With a filter all lines stay whole, since a filter
  needs whole lines.
"""

from __future__ import annotations

from elastic_run.multiprocessing.output.console import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.output.console import Stream
    from elastic_run.multiprocessing.output.sink import Backlog, FilteredCopy

#: Seconds that a worker has to go on with a line that it writes in several pieces, while others wait.
_WAIT_LIMIT = 0.005
#: The same, and for the whole line, where no person watches: on a busy machine a worker may get no processor for a
#: while between text and newline.
_WHOLE_LINE_WAIT = 0.25
_PASS_THROUGH_HOLD = 1 << 20
#: The same for a line that is longer than the limit.
_LONG_LINE_WAIT = 1.0
_LONG_LINE_HOLD = 1 << 28
#: Prefixes may make a batch of short lines many times longer: batches are cut so that they stay below this.
_EXPANDED = 1 << 22
#: Bytes that are read back from a log file at once.
_REFILL = 1 << 18
_PROGRESS_INTERVAL = 1.0
#: Seconds of silence after which an unfinished line is shown.
_SILENCE = 0.1
_NEWLINE = 10
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


class Outlet(Source):
    """Where a channel's bytes go on the console."""

    def __init__(self, loop: Loop, stream: Stream) -> None:
        self._loop = loop
        self._stream = stream
        self._pieces: list[bytes] = []
        self._is_ended = False
        self._on_clear: Callable[[], None] | None = None
        self._fold: tuple[InterruptFold, int] | None = None
        #: A traceback that may be left out, and the end of its time.
        self._held = bytearray()
        self._held_until: Timer | None = None

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept back, and more may be written now."""
        return not self._pieces and self._stream.may_write(self)

    @property
    def is_ready(self) -> bool:
        """Whether more may be taken now without growing."""
        return self.is_clear

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Call once, as soon as it is clear."""
        self._on_clear = callback
        if not self._pieces:
            self._stream.wait(self, self._pump)

    def take(self, data: bytes) -> None:
        """Accept the next bytes; never fails, never blocks."""
        if self._fold is None or not self._hold(data):
            self._accept(data)

    def end(self) -> None:
        """Accept that nothing follows."""
        self._release()
        self._end_last_line()
        self._on_clear = None
        self._is_ended = True
        self._pump()

    def _accept(self, data: bytes) -> None:
        raise NotImplementedError

    def _emit(self, piece: bytes) -> None:
        raise NotImplementedError

    def _end_last_line(self) -> None:
        """Make a piece of a line that is not finished."""

    @property
    def _is_behind(self) -> bool:
        """Whether there are pieces to be made of what was taken before."""
        return False

    def _refill(self) -> None:
        """Make some."""

    def _pump(self) -> None:
        may_refill = True
        while self._pieces or self._is_behind:
            # Refilled once, so that waiting sources take turns.
            if not self._stream.may_write(self) or not (self._pieces or may_refill):
                self._stream.wait(self, self._pump, is_first=self._is_ended)
                return
            if self._pieces:
                self._emit(self._pieces.pop(0))
            else:
                self._refill()
                may_refill = False
        if self._is_ended:
            self._stream.release(self)
        elif self._on_clear is not None:
            on_clear, self._on_clear = self._on_clear, None
            on_clear()

    # After Ctrl-C, from the first line of a traceback on, the stream is held for a moment or until its end.
    def fold(self, fold: InterruptFold, local_rank: int) -> None:
        """Let a KeyboardInterrupt that another worker has shown be left out from now on."""
        self._fold = (fold, local_rank)

    def _hold(self, data: bytes) -> bool:
        """Hold a traceback back, and accept the bytes in front of it; return whether there is one."""
        start = 0
        if not self._held:
            start = data.find(_FIRST_LINE)
            if start < 0 or not self.is_clear:  # a backlog counts the bytes of the log file, which has every byte
                return False
            self._held_until = self._loop.call_later(_HOLD, self._release)
        if start:
            self._accept(data[:start])
        self._held += data[start:]
        if len(self._held) > _MOST_HELD:
            self._release()
        return True

    def _release(self) -> None:
        if self._held_until is not None:
            self._held_until.cancel()
            self._held_until = None
        if self._held and self._fold is not None:
            held = self._fold[0].choose(bytes(self._held), self._fold[1]) if self.is_clear else bytes(self._held)
            self._held.clear()
            if held:
                self._accept(held)


class PassThrough(Outlet):
    """Gives bytes on unchanged and unbuffered.

    `is_watched` says that it is a terminal, where a prompt or a progress bar must not hold the others up. Otherwise
    lines stay whole if they take no longer than `_WHOLE_LINE_WAIT`.
    """

    wait_limit = _WAIT_LIMIT
    hold_limit = _PASS_THROUGH_HOLD

    def __init__(self, loop: Loop, stream: Stream, *, is_watched: bool = True) -> None:
        super().__init__(loop, stream)
        if not is_watched:
            self.wait_limit = self.hold_time = _WHOLE_LINE_WAIT

    def _accept(self, data: bytes) -> None:
        self._pieces.append(data)
        self._pump()

    def _emit(self, piece: bytes) -> None:
        if self._stream.is_contended:
            end = piece.rfind(b"\n") + 1
            if 0 < end < len(piece):
                self._pieces.insert(0, piece[end:])
                piece = piece[:end]
        self._stream.write(self, piece, starts_line=False)


class Lines(Outlet):
    """Gives whole lines on, each after a prefix.

    `limit` is how many bytes a line may have before it is written in parts; `copy` gets the lines that a filter looks
    for; `backlog` remembers what the console can't take yet.
    """

    wait_limit = _LONG_LINE_WAIT
    hold_limit = _LONG_LINE_HOLD

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
        super().__init__(loop, stream)
        self._prefix = prefix = prefix.replace(b"\n", b" ")
        self._newline = b"\n" + prefix
        self._limit = limit
        self._copy = copy
        self._backlog = backlog
        self._partial = bytearray()
        #: Whether the last piece given to the stream ended within a line, and whether the last one made does.
        self._is_inside = False
        self._is_part_given = False
        self._is_progress_shown = False
        #: Whether the unfinished line has a carriage return, and when the last bytes of it came;
        #: whether it was shown because of a pause.
        self._is_progress = False
        self._fed_at = 0.0
        self._has_paused = False
        self._most = max(1, _EXPANDED // max(1, len(prefix)))
        self._timer: Timer | None = None

    @property
    def is_clear(self) -> bool:
        """Whether nothing is kept back, also in the log file, and more may be written now."""
        return not self._backlog and super().is_clear

    @property
    def is_ready(self) -> bool:
        """Whether more may be taken now without growing."""
        return self.is_clear or (self._backlog is not None and self._backlog.is_sound)

    def fold(self, fold: InterruptFold, local_rank: int) -> None:
        """See `Outlet.fold`; not with a filter, which looks for its lines in all that is shown."""
        if self._copy is None:
            super().fold(fold, local_rank)

    def _accept(self, data: bytes) -> None:
        """Show bytes now, or when the console has come so far."""
        backlog = self._backlog
        if backlog is None or self.is_clear:
            self._split(data)
            self._pump()
            return
        if not backlog and not self._pieces:
            self._stream.wait(self, self._pump)
        backlog.add(data)

    def _split(self, data: bytes) -> None:
        """Make pieces of the lines that are complete; the rest waits for its end."""
        if self._is_progress_shown and data:
            self._is_progress_shown = False
            data = data.removeprefix(b"\n")
        end = data.rfind(b"\n") + 1
        if end:
            self._add(memoryview(data)[:end])
            self._partial = bytearray(memoryview(data)[end:])
            self._is_progress = self._has_paused = False
            self.wait_limit = _LONG_LINE_WAIT
        else:
            self._partial += data
        if self._partial:
            self._look_at_partial(data)

    def _end_last_line(self) -> None:
        if not self._is_behind:
            self._end_line()

    def _end_line(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._partial or self._is_part_given:
            self._add(b"\n")
        if self._backlog is not None:
            self._backlog.close()

    @property
    def _is_behind(self) -> bool:
        return bool(self._backlog)

    def _refill(self) -> None:
        if self._backlog is None:
            return
        if self._stream.is_closed:
            self._backlog.close()
        else:
            self._split(self._backlog.take(_REFILL))
        if self._is_ended and not self._backlog:
            self._end_line()

    def _look_at_partial(self, data: bytes) -> None:
        is_part = self._is_inside and self._stream.is_held_by(self)
        if is_part or len(self._partial) > self._limit:
            if self._has_paused:
                # A rank that prints a dot now and then would hold the others up for as long as it does so.
                self.wait_limit = _WAIT_LIMIT
            self._add(b"")
            return
        self._fed_at = self._loop.now()
        if b"\r" in data:
            self._is_progress = True
        if self._timer is None and self._is_progress:
            self._timer = self._loop.call_later(_PROGRESS_INTERVAL, self._show_progress)
        elif self._timer is None and self._copy is None:
            self._timer = self._loop.call_later(_SILENCE, self._show_prompt)

    def _show_prompt(self) -> None:
        """Show an unfinished line after which nothing has come for a while."""
        self._timer = None
        if not self._partial or self._is_behind:
            return
        silent_at = self._fed_at + _SILENCE
        if self._is_progress:
            self._timer = self._loop.call_later(_PROGRESS_INTERVAL - _SILENCE, self._show_progress)
        elif self._loop.now() < silent_at:
            self._timer = self._loop.call_at(silent_at, self._show_prompt)
        else:
            self._has_paused = True
            self._add(b"")
            self._pump()

    def _show_progress(self) -> None:
        self._timer = None
        end = self._partial.rfind(b"\r") + 1
        if end:
            rest = self._partial[end:]
            self._partial = self._partial[: end - 1].replace(b"\r", b"\r" + self._prefix)
            self._add(b"\r\n")
            self._partial = rest
            self._is_progress_shown = not rest
            self._pump()

    def _add(self, data: bytes | memoryview) -> None:
        """Make pieces of the unfinished line and what follows it, each with the prefix in front."""
        piece = b"".join((self._prefix, self._partial, data))
        self._partial.clear()
        start = len(self._prefix)
        if self._copy is not None:
            self._copy.take(self, self._prefix, piece[start:])
        self._is_part_given = piece[-1] != _NEWLINE
        if len(piece) - start <= self._most:
            self._pieces.append(piece)
            return
        while start < len(piece):
            end = piece.rfind(b"\n", start, start + self._most) + 1 or start + self._most
            self._pieces.append(self._prefix + piece[start:end])
            start = end

    def _emit(self, piece: bytes) -> None:
        start = len(self._prefix)
        is_new = True
        if self._is_inside:
            is_new = not self._stream.is_held_by(self)
            if is_new and piece[start] == _NEWLINE:  # whoever broke the long line has ended it
                piece = self._prefix + piece[start + 1 :]
        self._is_inside = False
        if len(piece) == start:
            return
        self._is_inside = piece[-1] != _NEWLINE
        text = memoryview(piece.replace(b"\n", self._newline) if start else piece)
        end = len(text) if self._is_inside else len(text) - start
        self._stream.write(self, text[0 if is_new else start : end], starts_line=is_new)


class InterruptFold:
    """The equal KeyboardInterrupts of the workers of one round, shown once on the console after Ctrl-C.

    It exists only since SIGINT was sent to the workers. Before, no byte is looked at. All bytes but the tracebacks that
    are left out are shown, in their order. Log files and the tail for the report get every byte, from the channel.
    """

    def __init__(self) -> None:
        import re

        self._ranks: dict[bytes, list[int]] = {}
        self._interrupt, self._place = re.compile(_INTERRUPT), re.compile(_PLACE)

    def choose(self, text: bytes, local_rank: int) -> bytes:
        """Return a worker's bytes without the tracebacks that were shown for another worker."""
        return self._interrupt.sub(lambda found: found[0] if self._is_first(found[0], local_rank) else b"", text)

    def _is_first(self, text: bytes, local_rank: int) -> bool:
        ranks = self._ranks.setdefault(text, [])
        if local_rank not in ranks:
            ranks.append(local_rank)
        return ranks[0] == local_rank

    def list_folded(self) -> list[tuple[str, list[int]]]:
        """Return the place (`train.py:88`) of each traceback that was shown once for several workers, and the ranks."""
        return [(self._name_place(text), sorted(ranks)) for text, ranks in self._ranks.items() if len(ranks) > 1]

    def _name_place(self, text: bytes) -> str:
        """Return the innermost frame, or ""."""
        places = self._place.findall(text)
        return f"{places[-1][0].decode(errors='replace').rpartition('/')[2]}:{places[-1][1].decode()}" if places else ""
