"""The keys of a stream in a TCPStore: what a job store and our own server agree on.

Below the stream's key lie the number of entries (`count`), the position up to which they were trimmed (`floor`), and
the entries, each in the slot of its number.
"""

from __future__ import annotations

__all__ = ["count_key", "floor_key", "slot_key"]


def count_key(stream: bytes) -> bytes:
    """Return the key of the number of entries."""
    return stream + b"/count"


def floor_key(stream: bytes) -> bytes:
    """Return the key of the position up to which the entries were trimmed."""
    return stream + b"/floor"


def slot_key(stream: bytes, number: int) -> bytes:
    """Return the key of an entry."""
    return b"%s/%d" % (stream, number)
