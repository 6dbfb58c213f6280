"""Questions and answers over one non-blocking connection, many of which share one loop and one thread.

What is said is written down as a generator, as a blocking client would do it one line after another: it yields a
`Question` and is sent the answers. It yields None to rest until `wake`, or a number of seconds to rest. No thread, no
lock, no buffer of its own: a node of a crowd must cost less than what it asks of the server.
"""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.agent_client import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import TypeAlias

    from elastic_run.loop import Loop

    Answers: TypeAlias = list[bytes]
    Script: TypeAlias = Generator["Question | float | None", Answers, None]

#: Kinds of answers: so many bytes, or a string with its length before it.
BYTE = 1
NONCE = wire.U32.size
NUMBER = wire.I64.size
STRING = 0
#: Of HTTP: a whole answer, of which the body is kept; a head alone; a line of a body that streams. The first two are
#: empty where the server says that it can't just now.
HTTP = -1
HTTP_HEAD = -2
HTTP_LINE = -3
#: A string that may be missing: `NOTHING` stands for it then.
PRESENT = -4

_RECEIVE = 64 * 1024


class Question(NamedTuple):
    """What to send, and the kinds of the answers that come back."""

    data: bytes
    kinds: tuple[int, ...]


class Exchange:
    """One connection and its script.

    Args:
        loop: The loop that drives it.
        address: Host and port of the server, numeric.
        script: What is said; None to do no more than connect, and hang up.
        on_end: Called when the script is over, or the connection of one without a script is open.
    """

    __slots__ = (
        "_buffer",
        "_fd",
        "_interrupted",
        "_is_resting",
        "_kinds",
        "_loop",
        "_offset",
        "_on_end",
        "_script",
        "_socket",
        "found",
    )

    def __init__(
        self, loop: Loop, address: tuple[str, int], script: Script | None, on_end: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._script = script
        self._on_end = on_end
        self._buffer = b""
        self._offset = 0
        self._kinds: tuple[int, ...] = ()
        self.found: Answers = []
        self._is_resting = False
        self._interrupted: tuple[Script | None, tuple[int, ...]] | None = None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.settimeout(0)
        self._fd = self._socket.fileno()
        error = self._socket.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, f"{address}: connect")
        loop.add_writer(self._fd, self._open)

    def wake(self) -> None:
        """Let a script that rests go on; harmless where it doesn't."""
        if self._is_resting:
            self._is_resting = False
            self._resume([])

    def interrupt(self, script: Script) -> None:
        """Let another script go first; the answer to the last question comes behind its end.

        Args:
            script: What is said while the server has nothing to answer.
        """
        self._interrupted = self._script, self._kinds
        self._script = script
        self._resume(None)

    def _open(self) -> None:
        self._loop.remove_writer(self._fd)
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        if self._script is None:
            self._end()
            return
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._fd, self._receive)
        self._resume(None)

    def _resume(self, answers: Answers | None) -> None:
        script = self._script
        if script is None:
            return
        try:
            question = next(script) if answers is None else script.send(answers)
        except StopIteration:
            if self._interrupted is None:
                self._end()
                return
            (self._script, self._kinds), self._interrupted, self.found = self._interrupted, None, []
            return
        if question is None:
            self._is_resting = True
            return
        if isinstance(question, float):
            self._loop.call_later(question, lambda: self._resume([]))
            return
        self._kinds = question.kinds
        self.found = []
        # Some hundred bytes at a time: the kernel always takes them whole. None where only more answers are read.
        if question.data and self._socket.send(question.data) != len(question.data):
            message = "the server does not read"
            raise BlockingIOError(message)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE)
        except BlockingIOError:
            return
        if not data:
            message = "the server hung up"
            raise ConnectionError(message)
        self._buffer = self._buffer[self._offset :] + data if self._buffer else data
        self._offset = 0
        # What streams may bring several answers at once.
        while self._kinds and self._has_all():
            self._buffer, self._offset, self._kinds = self._buffer[self._offset :], 0, ()
            self._resume(self.found)

    def _has_all(self) -> bool:
        buffer, found = self._buffer, self.found
        for kind in self._kinds[len(found) :]:
            start, size = self._offset, kind
            if kind < 0:
                taken = _TAKERS[kind](buffer, start)
                if taken is None:
                    return False
                found.append(taken[0])
                self._offset = taken[1]
                continue
            if kind == STRING:
                if len(buffer) < start + wire.U64.size:
                    return False
                size = wire.U64.unpack_from(buffer, start)[0]
                start += wire.U64.size
            if len(buffer) < start + size:
                return False
            found.append(buffer[start : start + size])
            self._offset = start + size
        return True

    def _end(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._script = None
        if self._on_end is not None:
            self._on_end()


def _take_present(buffer: bytes, start: int) -> tuple[bytes, int] | None:
    at = start + wire.U64.size
    if len(buffer) < at:
        return None
    size = wire.U64.unpack_from(buffer, start)[0]
    if size == wire.MISSING:
        return NOTHING, at
    return (buffer[at : at + size], at + size) if len(buffer) >= at + size else None


# --- HTTP ------------------------------------------------------------------------------------------------------------
def _take_head(buffer: bytes, start: int) -> tuple[bytes, int] | None:
    end = buffer.find(b"\r\n\r\n", start)
    if end < 0:
        return None
    return buffer[start:end], end + 4


def _take_good_head(buffer: bytes, start: int) -> tuple[bytes, int] | None:
    taken = _take_head(buffer, start)
    return taken if taken is None or _is_good(taken[0]) else (b"", taken[1])


def _is_good(head: bytes) -> bool:
    status = head[9:12]
    if status not in (b"200", b"500", b"503"):  # with 500 etcd says that there are too many requests
        message = f"the server answers {head[:200]!r}"
        raise OSError(message)
    return status == b"200"


def _take_answer(buffer: bytes, start: int) -> tuple[bytes, int] | None:
    taken = _take_head(buffer, start)
    if taken is None:
        return None
    head, at = taken
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    if length is not None:
        end = at + int(length[1])
        return (buffer[at:end] if _is_good(head) else b"", end) if len(buffer) >= end else None
    body = b""
    while (chunk := _take_chunk(buffer, at)) is not None:
        if not chunk[0]:
            return body if _is_good(head) else b"", chunk[1]
        body, at = body + chunk[0], chunk[1]
    return None


def _take_chunk(buffer: bytes, start: int) -> tuple[bytes, int] | None:
    end = buffer.find(b"\r\n", start)
    if end < 0:
        return None
    size = int(buffer[start:end], 16)
    if not size:
        last = buffer.find(b"\r\n\r\n", end)  # there may be headers yet
        return (b"", last + 4) if last >= 0 else None
    after = end + 2 + size + 2
    return (buffer[end + 2 : after - 2], after) if len(buffer) >= after else None


#: By kind: gives what is there from a place in the bytes on, and where it ends; None while some of it is missing. etcd
#: puts each line of a stream into a chunk of its own.
_TAKERS: dict[int, Callable[[bytes, int], tuple[bytes, int] | None]] = {
    HTTP: _take_answer,
    HTTP_HEAD: _take_good_head,
    HTTP_LINE: _take_chunk,
    PRESENT: _take_present,
}
