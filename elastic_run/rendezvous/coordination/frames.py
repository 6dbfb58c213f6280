"""The frames of a connection between two agents: four bytes of length, one byte of kind, and JSON. Pure.

A connection begins with `PREAMBLE`: no client of torch's TCPStore begins with its first byte, so agents and workers can
share a port. What comes is bounded before a byte of it is kept.
"""

from __future__ import annotations

from struct import Struct

from elastic_run.core.protocol.codec import LARGEST, MessageError, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

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
    """Takes the bytes of a connection apart.

    Attributes:
        most: Bytes that a frame may have.
    """

    def __init__(self, most: int = LARGEST) -> None:
        self.most = most
        self._buffer = bytearray()

    @property
    def has_begun(self) -> bool:
        """Whether a frame has come in part."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes that have come."""
        self._buffer += data

    def read(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Return each frame that is whole by now: its kind and its content.

        Raises:
            MessageError: What has come is no frame, or a larger one than may come.
        """
        while len(self._buffer) >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._buffer)
            if size > self.most or kind not in (DOCUMENT, ACKNOWLEDGED, ANSWER, MESSAGE):
                message = f"a frame of {size} bytes and kind {kind!r}, where {self.most} bytes are the most"
                raise MessageError(message)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, decode(content) if content else {}
