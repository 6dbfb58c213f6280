"""A connection between a node and its coordinator, on the loop of one of them.

- A frame has four bytes of length, one byte of kind, and JSON. A connection begins with `PREAMBLE`: no client of
  torch's TCPStore begins with its first byte, so agents and workers can share a port.
- A document is sent when the one before was acknowledged; until then a newer one takes the place of one that waits.
- The other side's loop acknowledges each document within the lease, or it is silent: a process that is stopped, or
  whose machine is gone. A document that answers another one acknowledges it. The kernel watches idle connections
  (`notice_darkness`), which wakes nobody.
- `ENDED`: the end of the stream. Agent and guardian hold the connection together, so nothing of the node lives then. An
  agent that closes a connection and lives says so before (`part`), and its connection counts as `BROKEN`.
"""

from __future__ import annotations

import errno
import os
from struct import Struct

from elastic_run.core.job.codec import LARGEST, MessageError, decode, encode
from elastic_run.core.job.state import BROKEN, ENDED, SILENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from elastic_run.loop import Loop, Timer

#: The first bytes of an agent's connection. The number grows when agents can't understand each other any more.
PROTOCOL = 1
PREAMBLE = b"elastic-run %d\n" % PROTOCOL
#: What tells an agent of any release from other clients.
NAME = b"elastic-run "

# Kinds of frames.
DOCUMENT = b"D"  # what a node is, or shall do: whole, and to be acknowledged
ACKNOWLEDGED = b"A"  # the document before was read by the other side's loop
ANSWER = b"B"  # a document that acknowledges one
MESSAGE = b"M"  # anything else

#: Bytes of a frame before the other side has proved the token.
LARGEST_OPENING = 4096

_HEADER = Struct(">Ic")


def make_frame(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame of a kind above."""
    return _HEADER.pack(len(content), kind) + content


def encode_frame(kind: bytes, document: Mapping[str, Any]) -> bytes:
    """Return a frame with a document of JSON's types."""
    return make_frame(kind, encode(document))


class FrameReader:
    """Takes the bytes of a connection apart; a frame may have `most` bytes, which is checked before they are kept."""

    def __init__(self, most: int = LARGEST) -> None:
        self.most = most
        self.rest = bytearray()  # what has come, and was not read yet

    def read(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Return each frame that is whole by now, its kind and its content; raise `MessageError` for anything else."""
        while len(self.rest) >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self.rest)
            if size > self.most or kind not in (DOCUMENT, ACKNOWLEDGED, ANSWER, MESSAGE):
                message = f"a frame of {size} bytes and kind {kind!r}, where {self.most} bytes are the most"
                raise MessageError(message)
            end = _HEADER.size + size
            if len(self.rest) < end:
                return
            content = bytes(self.rest[_HEADER.size : end])
            del self.rest[:end]
            yield kind, decode(content) if content else {}


_RECEIVE = 1 << 16
#: Bytes that may wait for the other side before messages that nobody needs for certain are left out.
_HIGH_WATER = 1 << 20
#: Comes before the end of a connection whose owner lives: it may come again.
PARTING = {"kind": "parting"}
#: What the kernel says when it breaks a silent connection. On the same network the other machine has no address then.
_DARK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Link:
    """One side of a connection, whose socket this object owns.

    `on_end` is called once when the connection has ended by itself, with how and a clause for the user.
    """

    def __init__(
        self,
        loop: Loop,
        connected: _socket.socket,
        *,
        lease: float,
        on_document: Callable[[dict[str, Any]], None] = lambda _: None,
        on_message: Callable[[dict[str, Any]], None] = lambda _: None,
        on_end: Callable[[str, str], None] = lambda *_: None,
        most: int = LARGEST,
    ) -> None:
        self.lease = lease  # seconds in which the other side has to acknowledge a document
        self.on_document = on_document
        self.on_message = on_message
        self.on_end = on_end
        self.on_delivered: Callable[[], None] = lambda: None  # the other side has read all documents
        self.defers = False  # a document is acknowledged by `acknowledge`, once it is decided what follows from it
        self.is_foreign = False  # a defect that the other side's bytes show ends this connection only, not the thread
        self.is_closed = False
        self._has_parted = False
        self._loop = loop
        self._socket = connected
        self._fd = connected.fileno()
        self.reader = FrameReader(most)
        self._unsent = bytearray()
        self._next: bytes | None = None
        self._owes = False  # whether a document was read that is not acknowledged yet
        self._silence: Timer | None = None
        self._error: OSError | None = None
        connected.setblocking(False)
        loop.add_reader(self._fd, self._receive)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    # --- out ---------------------------------------------------------------------------------------------------------
    @property
    def has_delivered(self) -> bool:
        """Whether the other side has read all documents."""
        return self._silence is None and self._next is None

    def offer(self, document: bytes) -> None:
        """Send a document, encoded, in place of all that were not sent yet."""
        if not self.is_closed:
            self._next = document
            self._send_next()

    def acknowledge(self) -> None:
        """Say that the last document was read, if that is not said yet."""
        if self._owes and not self.is_closed:
            self._owes = False
            self._write(make_frame(ACKNOWLEDGED))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; it is left out where the other side has not read a lot of earlier ones."""
        if not self.is_closed and len(self._unsent) < _HIGH_WATER:
            self._write(encode_frame(MESSAGE, message))

    def part(self) -> None:
        """Close the connection though this process lives: the other side waits for it to come again."""
        if not self.is_closed:
            self._write(encode_frame(MESSAGE, PARTING))
            self.close()

    def close(self) -> None:
        """Close the connection without a word; harmless when it is closed."""
        if self.is_closed:
            return
        self.is_closed = True
        self._next = None
        self._stop_silence()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        try:
            # The guardian may hold the connection as well, and would keep it open.
            self._socket.shutdown(2)
        except OSError:
            pass
        self._socket.close()

    def _send_next(self) -> None:
        if self._next is not None and self._silence is None:
            kind, document = ANSWER if self._owes else DOCUMENT, self._next
            self._next, self._owes = None, False
            self._silence = self._loop.call_later(self.lease, self._tell_silence)
            self._write(make_frame(kind, document))

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = 0
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._note_error(error)
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._fd, self._write_on)

    def _write_on(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._note_error(error)
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    # --- in ----------------------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end_with(error)
            return
        if data:
            self.feed(data)
        elif self._error is not None:
            self._end_with(self._error)
        else:
            # In the middle of a frame it may be a living agent that could not say that it parts.
            self._end(BROKEN if self._has_parted or self.reader.rest else ENDED, "")

    def feed(self, data: bytes) -> None:
        """Take bytes that were read from the socket, now or before."""
        self.reader.rest += data
        try:
            for kind, content in self.reader.read():
                self._take_frame(kind, content)
                if self.is_closed:
                    return
        except MessageError as error:
            self._end(BROKEN, f"unreadable: {error}")
        except Exception:
            if not self.is_foreign:
                raise
            import logging

            logging.getLogger(__name__).exception("a defect of elastic-run ends a connection")
            self._end(BROKEN, "a defect")

    def _take_frame(self, kind: bytes, content: dict[str, Any]) -> None:
        if kind in (ACKNOWLEDGED, ANSWER):
            self._stop_silence()
            if kind == ACKNOWLEDGED:
                self._send_next()
            if self.has_delivered:
                self.on_delivered()
        if kind == ACKNOWLEDGED or self.is_closed:
            return
        if kind == MESSAGE and content == PARTING:
            self._has_parted = True
        elif kind == MESSAGE:
            self.on_message(content)
        else:
            self._owes = True
            self.on_document(content)
            if not self.is_closed:
                self._send_next()
                if not self.defers:
                    self.acknowledge()

    # --- the end -----------------------------------------------------------------------------------------------------
    def _tell_silence(self) -> None:
        self._receive()  # what has come already counts: this side's loop may have been busy
        if self._silence is not None:
            self._end(SILENT, f"silent for {self.lease:.1f} s")

    def _note_error(self, error: OSError) -> None:
        """Keep why nothing can be sent: the kernel tells it once, and a reader finds the end of the stream then."""
        if error.errno != errno.EPIPE:
            self._error = error

    def _end_with(self, error: OSError) -> None:
        if error.errno in _DARK:
            self._end(SILENT, f"silent for {self.lease:.1f} s")
        else:
            self._end(BROKEN, os.strerror(error.errno or 0).lower())

    def _end(self, how: str, detail: str) -> None:
        if not self.is_closed:
            # This process lives: a stopped one that reads this later must not count it as dead.
            self.part()
            self.on_end(how, detail)

    def _stop_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
