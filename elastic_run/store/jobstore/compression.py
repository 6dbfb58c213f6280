"""Values as etcd keeps them: large ones compressed, since etcd takes no request over 1.5 MB and writes all to disk.

The first byte says which: `+` as it is, `z` compressed. A value that `compress` did not make comes out as it
is: its reader must check what strangers may have written anyway.
"""

from __future__ import annotations

import zlib

from elastic_run.store.limits import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = b"+"
_COMPRESSED = b"z"
_LARGE = 4096
#: Bytes that a value may decompress to: what others wrote must not take all memory.
_LIMIT = 64 * 1024 * 1024


def compress(value: bytes) -> bytes:
    """Return what to store for a value; equal values give equal results."""
    return _PLAIN + value if len(value) < _LARGE else _COMPRESSED + zlib.compress(value, 1)


def decompress_all(stored: Iterable[bytes]) -> list[bytes]:
    """Return the values that were stored; together they take no more than a bound, and the rest stays as it is."""
    values, room = [], MESSAGE_LIMIT
    for value in stored:
        values.append(decompress(value, room))
        room = max(room - len(values[-1]), 1)
    return values


def decompress(stored: bytes, most: int = MESSAGE_LIMIT) -> bytes:
    """Return the value that was stored, or what is stored where `compress` did not make it, or is more than `most`."""
    if stored[:1] == _PLAIN:
        return stored[1:]
    if stored[:1] == _COMPRESSED:
        decompressor = zlib.decompressobj()
        try:
            value = decompressor.decompress(stored[1:], min(most, _LIMIT))
        except zlib.error:
            return stored
        return value if decompressor.eof else stored
    return stored
