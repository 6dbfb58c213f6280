"""The last bytes of a stream, for the report, and its last exception, even if much output has followed it.

An exception may have a message of megabytes (all keys that a checkpoint lacks, a tensor), which stands behind its type
and its frames. And when a program dies of one, its other threads, its exit handlers and the processes that it started
write on. So of a traceback that leaves the window the first `_HEAD_BYTES` are kept until there is another one.

Rules
- A traceback is recognised by its first line. It replaces the traceback before it, unless it follows from that one (a
  chain), is nested in it (a member of an exception group) or was ignored by Python.
- Of a chain the first traceback, which has the origin, and the last two are kept.
- The search for first lines costs 10 to 20 us for each 64 KiB; the rest of the work is done only after a first line.
"""

from __future__ import annotations

import os

from elastic_run.contract import CAPTURE_BYTES, LOST_LINES

_FIRST_LINE = b"Traceback (most recent call last)"
#: Bytes of one traceback that are kept: its frames, its exception and the beginning of the message. Output of other
#: threads may stand between them.
_HEAD_BYTES = 24 * 1024
#: Tracebacks of a chain that are kept.
_MOST_IN_CHAIN = 3
#: Bytes before a first line that are looked at, and of them what another writer may put before each of its lines.
_CONTEXT_BYTES = 512
_PREFIX_BYTES = 200
_CHAINED = (b"The above exception was the direct cause of", b"During handling of the above exception, another")
_IGNORED = b"Exception ignored"
_GROUP = b"+ Exception Group "
#: Marks in place of lost bytes: of a message, or of so many lines that the program may have gone on.
_GAP = b" [...]\n"
_LINES_GAP = b"\n" + LOST_LINES.encode() + b"\n"
_MOST_LOST_LINES = 100
#: Bytes of a log file that are looked at in any case, and that are read at once.
_FILE_BYTES = 1 << 20
#: Bytes of a log file, from its end, in which its last exception is looked for: 0.1 s.
_FILE_SEARCHED = 1 << 28
#: Bytes before an exception that are read, too: there stands what it followed from.
_BEFORE = 1 << 16
#: More than the first line of a traceback has.
_FIRST_LINE_BYTES = 64


class Tail:
    """Keeps the end of what was added, `contract.CAPTURE_BYTES` of it, and the last exception."""

    __slots__ = ("_chain", "_seen", "_text")

    def __init__(self) -> None:
        #: The end of the stream; of its first `_seen` bytes, before the window, the chain has what is kept.
        self._text = bytearray()
        self._seen = 0
        self._chain: list[_Head] = []

    def add(self, data: bytes) -> None:
        """Append data, and forget what is too old."""
        self._text += data
        if len(self._text) > 2 * CAPTURE_BYTES + _CONTEXT_BYTES:  # not at every byte: moving the rest down costs
            self._forget()

    def read(self) -> bytes:
        """Return the end of the stream, and before it its last exception."""
        self._forget()
        return b"".join([head.read() for head in self._chain]) + self._text[self._seen :]

    def _forget(self) -> None:
        """Drop output that is too old, but keep the beginning of an exception."""
        end = len(self._text) - CAPTURE_BYTES
        if end <= self._seen:
            return
        place = self._seen - 1
        while (place := self._text.find(_FIRST_LINE, place + 1, end + len(_FIRST_LINE) - 1)) >= 0:
            self._read_first_line(place)
        self._give_to_head(end)
        del self._text[: max(0, end - _CONTEXT_BYTES)]
        self._seen = min(end, _CONTEXT_BYTES)

    def _read_first_line(self, place: int) -> None:
        """Begin with a traceback, unless it says nothing new: a member of a group, or one that Python has ignored."""
        context = bytes(self._text[max(0, place - _CONTEXT_BYTES) : place])
        line = max(context.rfind(b"\n"), context.rfind(b"\r")) + 1
        prefix, before = context[line:], context[:line]
        is_in_group = bool(self._chain) and self._chain[-1].is_group
        is_member = is_in_group and prefix.removesuffix(b"Exception Group ").rstrip().endswith(b"|")
        if is_member or _IGNORED in before.rstrip(b"\r\n").rpartition(b"\n")[2]:
            return
        start = place - len(prefix) if len(prefix) <= _PREFIX_BYTES else place
        chained = max(before.rfind(words) for words in _CHAINED)
        if chained >= 0:
            start = place - len(context) + before.rfind(b"\n", 0, chained) + 1
        self._give_to_head(start)
        if chained < 0:
            self._chain.clear()
        elif len(self._chain) == _MOST_IN_CHAIN:
            del self._chain[1]
        self._chain.append(_Head(is_group=prefix.endswith(_GROUP)))
        self._seen = start

    def _give_to_head(self, end: int) -> None:
        """Give the last traceback what stands behind it, as far as that was not seen."""
        if self._chain and end > self._seen:
            self._chain[-1].add(self._text[self._seen : end])
            self._seen = end


class _Head:
    """The beginning of a traceback, and how much more there was."""

    __slots__ = ("_lost", "_lost_lines", "_text", "is_group")

    def __init__(self, *, is_group: bool) -> None:
        self.is_group = is_group
        self._text = bytearray()
        self._lost = self._lost_lines = 0

    def add(self, data: bytearray) -> None:
        """Take the next bytes that stand behind it."""
        room = _HEAD_BYTES - len(self._text)
        self._text += data[:room]
        if len(data) > room:
            self._lost += len(data) - room
            if self._lost_lines <= _MOST_LOST_LINES:
                self._lost_lines += data.count(b"\n", room) + data.count(b"\r", room)

    def read(self) -> bytes:
        """Return what is kept."""
        if self._lost_lines > _MOST_LOST_LINES:
            return bytes(self._text) + _LINES_GAP
        return bytes(self._text) + _GAP * bool(self._lost)


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
        found = text.rfind(_FIRST_LINE, 0, min(end - start, len(text)) + len(_FIRST_LINE) - 1)
        if found >= 0:
            return start + found
        end = start
    return -1
