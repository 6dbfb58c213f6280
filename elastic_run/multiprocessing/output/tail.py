"""The last bytes of a stream, for the report, and its last exception, even if much output has followed it.

An exception may have a message of megabytes (all keys that a checkpoint lacks, a tensor), which stands behind its type
and its frames. And when a program dies of one, its other threads, its exit handlers and the processes that it started
write on. So a traceback that leaves the window is kept until there is another one, in bounded memory.

Rules
- A traceback is recognised by its first line. It replaces the traceback before it, unless it follows from that one (a
  chain), is nested in it (a member of an exception group) or was ignored by Python.
- Of each traceback these parts are kept: the first and the last frames, the line with the exception's name, and the
  beginning of its message. Lines of other threads between the frames are dropped: there may be thousands. Until a line
  names the exception, a few lines with the end of a name are kept, since threads may have written into its line.
- Of a chain the first traceback, which has the origin, and the last two are kept.
- The search for first lines costs 10 to 20 us for each 64 KiB; the rest of the work is done only after a first line.
"""

from __future__ import annotations

import os

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_LINE = b"Traceback (most recent call last)"
#: Bytes of one traceback that are kept of its outermost and its innermost frames, and from its exception on.
_OUTER_BYTES = 4 * 1024
_INNER_BYTES = 8 * 1024
_MESSAGE_BYTES = 8 * 1024
#: Bytes behind a first line in which the line that names the exception is looked for, and bytes of an unfinished line.
_SEARCHED_BYTES = 1 << 20
_LINE_BYTES = 1024
#: Tracebacks of a chain that are kept.
_MOST_IN_CHAIN = 3
#: Bytes before a first line that are looked at, and of them what another writer may put before each of its lines.
_CONTEXT_BYTES = 512
_PREFIX_BYTES = 200
_CHAINED = (b"The above exception was the direct cause of", b"During handling of the above exception, another")
_IGNORED = b"Exception ignored"
_GROUP = b"+ Exception Group "
#: Beginnings of lines that stand before the line that names an exception; 0xe2 begins the edges of rich's box.
_INDENTED = b" \t\r\n\xe2"
#: Ends of an exception's name that no other word of a log has.
_NAMES = (b"Error", b"Exception", b"Exit", b"Interrupt", b"Failure", b"Timeout", b"Warning")
#: Marks in place of lost bytes: of a message, or of so many lines that the program may have gone on.
_GAP = b" [...]\n"
_LINES_GAP = contract.LOST_LINES.encode() + b"\n"
_MOST_LOST_LINES = 100
#: Begins a frame. Lines behind each of them that are kept as they hold the end of a name: other output may tear them.
_FRAME = b'  File "'
_MOST_TORN = 4
#: Bytes of a log file that are looked at in any case, and that are read at once.
_FILE_BYTES = 1 << 20
#: Bytes of a log file, from its end, in which its last exception is looked for: 0.1 s.
_FILE_SEARCHED = 1 << 28
#: Bytes before an exception that are read, too: there stands what it followed from.
_BEFORE = 1 << 16
#: More than the first line of a traceback has.
_FIRST_LINE_BYTES = 64
#: Seconds without output that count as a silence.
SILENCE = 10.0
#: Bytes of the last output that are kept, to show its last line.
_LAST_BYTES = 512


class Tail:
    """Keeps the end of what was added, `contract.CAPTURE_BYTES` of it, and the last exception."""

    __slots__ = ("_exception", "_pieces")

    def __init__(self) -> None:
        self._pieces = bytearray()
        self._exception = LastException()

    def add(self, data: bytes) -> None:
        """Append data, and forget what is too old."""
        self._pieces += data
        if len(self._pieces) > 2 * contract.CAPTURE_BYTES:  # not at every byte: moving the rest down costs
            self._forget()

    def read(self) -> bytes:
        """Return the end of the stream, and before it its last exception."""
        self._forget()
        return self._exception.read() + self._pieces

    def _forget(self) -> None:
        """Drop output that is too old, but keep an exception."""
        old = len(self._pieces) - contract.CAPTURE_BYTES
        if old > 0:
            self._exception.take(self._pieces, old)
            del self._pieces[:old]


class LastException:
    """Keeps the last traceback of a stream, and the tracebacks of the exceptions that led to it."""

    __slots__ = ("_before", "_chain")

    def __init__(self) -> None:
        self._chain: list[_Traceback] = []
        #: The end of what was taken.
        self._before = b""

    def take(self, text: bytearray, end: int) -> None:
        """Take the next bytes of the stream."""
        start = 0
        if find_last(text, end) >= 0:
            start = self._read_tracebacks(text, end)
        if self._chain:
            self._chain[-1].add(memoryview(text)[start:end])
        self._before = (self._before + text[max(0, end - _CONTEXT_BYTES) : end])[-_CONTEXT_BYTES:]

    def _read_tracebacks(self, text: bytearray, end: int) -> int:
        """Begin with each traceback in turn; return how far all was taken."""
        taken, place = 0, -1
        while (place := text.find(_FIRST_LINE, place + 1, end + len(_FIRST_LINE) - 1)) >= 0:
            context = (self._before + text[max(0, place - _CONTEXT_BYTES) : place])[-_CONTEXT_BYTES:]
            line = max(context.rfind(b"\n"), context.rfind(b"\r")) + 1
            prefix = context[line:]
            if self._goes_on(prefix, context[:line]):
                continue
            if self._chain:
                self._chain[-1].add(memoryview(text)[taken : max(taken, place - len(prefix))])
            self._begin(prefix, context[:line])
            taken = place
        return taken

    def _goes_on(self, prefix: bytes, before: bytes) -> bool:
        """Whether a traceback says nothing new: a member of a group, or one that Python has ignored."""
        is_in_group = bool(self._chain) and self._chain[-1].is_group
        is_member = is_in_group and prefix.removesuffix(b"Exception Group ").rstrip().endswith(b"|")
        return is_member or _IGNORED in before.rstrip(b"\r\n").rpartition(b"\n")[2]

    def _begin(self, prefix: bytes, before: bytes) -> None:
        chained = max(before.rfind(words) for words in _CHAINED)
        if chained < 0:
            self._chain.clear()
        elif self._chain:
            self._chain[-1].end_with(before[before.rfind(b"\n", 0, chained) + 1 :])
        if len(self._chain) == _MOST_IN_CHAIN:
            del self._chain[1]
        is_group = prefix.endswith(_GROUP)
        own = prefix if len(prefix) <= _PREFIX_BYTES else b""
        self._chain.append(_Traceback(own, is_group=is_group))

    def read(self) -> bytes:
        """Return what is kept; what was taken last stands at its end, unless so much followed that it was cut."""
        return b"".join([traceback.read() for traceback in self._chain])


class _Traceback:
    """One traceback: the lines of its frames, without lines of other threads between them, then its message."""

    __slots__ = (
        *("_inner", "_is_adjacent", "_line", "_lost", "_lost_lines"),
        *("_prefix", "_room", "_searched", "_text", "_torn", "is_group"),
    )

    def __init__(self, prefix: bytes, *, is_group: bool) -> None:
        self.is_group = is_group
        self._prefix = prefix
        self._text = bytearray(prefix)
        self._inner = bytearray()
        self._room = _OUTER_BYTES
        #: The unfinished line at the end of what was searched, and whether the line before was one of the frames.
        self._line = b""
        self._is_adjacent = True
        self._torn = 0
        #: Bytes in which the exception may still be looked for; 0 when it was found.
        self._searched = _SEARCHED_BYTES
        self._lost = self._lost_lines = 0

    def add(self, data: memoryview) -> None:
        """Take the next bytes that stand behind it."""
        if self._searched:
            rest = self._search(self._line + data)
            self._searched = max(0, self._searched - len(data)) if rest is None else 0
            if rest is None:
                return
            self._text += self._inner
            self._inner.clear()
            self._room = _MESSAGE_BYTES
            data = memoryview(rest)
        self._text += data[: self._room]
        lost = bytes(data[self._room :])
        self._room -= min(self._room, len(data))
        self._lost += len(lost)
        if self._lost_lines <= _MOST_LOST_LINES:
            self._lost_lines += lost.count(b"\n") + lost.count(b"\r")

    def _search(self, text: bytes) -> bytes | None:
        """Keep the lines of the frames; return what stands from the exception on, or None as long as it isn't there."""
        place = 0
        has_name = any(name in text for name in _NAMES)
        while (end := text.find(b"\n", place) + 1) or len(text) - place > _LINE_BYTES:
            end = end or len(text)
            if self._is_end(text[place : min(end, place + _LINE_BYTES)]):
                return text[place:]
            if self._is_adjacent or (has_name and self._is_torn(text[place:end])):
                self._keep(text[place:end])
            place = end
        self._line = text[place:]
        return None

    def _is_end(self, line: bytes) -> bool:
        """Whether a line names the exception, or can't belong to a group."""
        own = line.removeprefix(self._prefix)
        if self.is_group:
            return _FIRST_LINE not in own and own.lstrip(b" ")[:1] not in b"|+"
        if own[:1] in _INDENTED or _FIRST_LINE in own or _FRAME in own:
            self._is_adjacent = bool(own.strip())
            self._torn *= _FRAME not in own
            return False
        was_adjacent, self._is_adjacent = self._is_adjacent, False
        return _names_exception(own.partition(b":")[0].strip(), is_adjacent=was_adjacent)

    def _is_torn(self, line: bytes) -> bool:
        """Whether a line that isn't whole may name the exception: one of the first such behind a frame."""
        if self._torn == _MOST_TORN or not any(name in line for name in _NAMES):
            return False
        self._torn += 1
        return True

    def _keep(self, line: bytes) -> None:
        if len(line) <= self._room:
            self._text += line
            self._room -= len(line)
            return
        self._room = 0
        self._inner += line
        if len(self._inner) > 2 * _INNER_BYTES:
            del self._inner[: self._inner.find(b"\n", _INNER_BYTES) + 1 or _INNER_BYTES]
            # Indented as a line of code is, so that the frames go on behind it.
            self._inner[:0] = self._prefix + b"   " + _GAP

    def end_with(self, text: bytes) -> None:
        """Say what followed from it, where that was lost."""
        if self._lost:
            self._text += _GAP + text
            self._lost = self._lost_lines = 0

    def read(self) -> bytes:
        """Return what is kept."""
        if self._searched:
            return bytes(self._text + self._inner) + self._line
        if self._lost_lines > _MOST_LOST_LINES:
            return bytes(self._text) + b"\n" + _LINES_GAP
        return bytes(self._text) + _GAP * bool(self._lost)


def _names_exception(word: bytes, *, is_adjacent: bool) -> bool:
    """Whether a line that begins with a word names an exception; behind others' lines it has to look like one."""
    name = word.rpartition(b".")[2]
    if not name.decode("ascii", "replace").isidentifier():
        return False
    return name.endswith(_NAMES) or (is_adjacent and (b"." in word or name[:1].isupper() or name[:1] == b"_"))


def read_tail(path: str, *, is_thorough: bool = True) -> bytes:
    """Return the end of a log file that a worker wrote itself, as `Tail` does, or nothing when it can't be read.

    `is_thorough`: look for an exception in more than the last MiB, which may take 0.1 s.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return _read_end(fd, _FILE_SEARCHED if is_thorough else _FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _read_end(fd: int, searched: int) -> bytes:
    size = os.fstat(fd).st_size
    start = max(0, size - _FILE_BYTES)
    found = _find_traceback(fd, size, max(0, size - searched)) if start else -1
    if 0 <= found < start:
        start = max(0, found - _BEFORE)
    tail = Tail()
    while start < size and (data := os.pread(fd, min(_FILE_BYTES, size - start), start)):
        tail.add(data)
        start += len(data)
    return tail.read()


def _find_traceback(fd: int, end: int, least: int) -> int:
    """Return where the last traceback in a part of a file begins, or -1; backwards, a MiB at a time."""
    while end > least:
        start = max(least, end - _FILE_BYTES)
        # A first line may go on in the part behind, which was searched already.
        text = os.pread(fd, end - start + _FIRST_LINE_BYTES, start)
        found = find_last(text, min(end - start, len(text)))
        if found >= 0:
            return start + found
        end = start
    return -1


def find_last(text: bytes | bytearray, end: int) -> int:
    """Return where the last traceback begins before a place, or -1."""
    return text.rfind(_FIRST_LINE, 0, end + len(_FIRST_LINE) - 1)


# --- when a worker has last written, and what -------------------------------------------------------------------------
class Activity:
    """When a worker has last written (`last`, monotonic seconds), as far as its output passes through the launcher.

    `on_output` is called with the worker's first output, and with output that ends a silence: the local rank, and the
    silence in seconds, or None for the first output.
    """

    __slots__ = ("_has_written", "_local_rank", "_on_output", "_recent", "last")

    def __init__(self, local_rank: int, began_at: float, on_output: Callable[[int, float | None], None]) -> None:
        self.last = began_at
        self._local_rank = local_rank
        self._has_written = False
        self._recent = b""
        self._on_output = on_output

    def add(self, data: bytes, now: float) -> None:
        """Take note of output, which may come in pieces of any size."""
        self._recent = (self._recent + data[-_LAST_BYTES:])[-_LAST_BYTES:]
        silence, self.last = now - self.last, now
        if not self._has_written:
            self._has_written = True
            self._on_output(self._local_rank, None)
        if silence >= SILENCE:
            self._on_output(self._local_rank, silence)

    @property
    def last_line(self) -> str:
        """The last line that isn't blank, or its end; empty before the first output."""
        return last_line(self._recent)


def last_line(data: bytes) -> str:
    """Return the last line of some output that isn't blank, or an empty string."""
    lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
