"""The layout of the memory in which one worker keeps its training state, and which state may be loaded from it. Pure.

A memory has a page of records and two halves. A generation of the state is written into one half: the tensors as raw
bytes, then an index of them. The half's record is cleared before and written last, so that a worker that is killed in
between leaves no record, and the generation in the other half is untouched. The ranks of a world write one generation
under one key: a key with a rank missing is not loaded, and keys are never mixed.
"""

from __future__ import annotations

import json
import zlib

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Bytes before the first half, and of a record.
HEADER, RECORD = 4096, 1024
HALVES = 2
_CHECK = 8
_UNITS: dict[str, int] = {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True, slots=True)
class Generation:
    """One state of all ranks."""

    number: int  # Counts the generations of the job
    key: str  # Random, made by the rank that coordinated the save: two saves never have the same one
    label: str  # The user's name for it, such as the step
    world_size: int  # Ranks that wrote it


@dataclass(frozen=True, slots=True)
class Record:
    """What one half of a memory holds. Positions count bytes from `start`, so that a copy may lie in another half."""

    generation: Generation
    rank: int  # The rank whose part this is
    start: int  # The first byte of the half, from the beginning of the memory
    index_start: int  # Where the index begins, behind the tensors
    index_length: int  # Its length in bytes
    index_check: int  # CRC-32 of the index
    check: int | None = None  # The checksum of the tensors, None until it is computed
    saved_at: float = 0.0  # Monotonic seconds of this machine when it was written, for display

    @property
    def length(self) -> int:
        """The bytes of tensors and index."""
        return self.index_start + self.index_length


def read_size(text: str) -> int:
    """Return the bytes of --keep-state, 0 for `auto`; raise ValueError where it is neither that nor a size."""
    if text == "auto":
        return 0
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :]
    if not (number.isascii() and number.isdecimal()) or unit not in _UNITS or int(number) == 0:
        message = "is neither auto nor a size with a unit, such as 64GB or 500MiB"
        raise ValueError(message)
    return int(number) * _UNITS[unit]


def half_of(size: int, half: int) -> tuple[int, int]:
    """Return the first byte of a half and the first byte after it, for a memory of so many bytes."""
    length = (size - HEADER) // HALVES // HEADER * HEADER
    return HEADER + half * length, HEADER + (half + 1) * length


def encode(record: Record) -> bytes:
    """Return a record as `RECORD` bytes: text, padded with spaces."""
    one = record.generation
    values = (one.number, one.key, one.label, one.world_size, record.rank, record.start)
    rest = (record.index_start, record.index_length, record.index_check, record.check, record.saved_at)
    text = json.dumps((*values, *rest)).encode()
    return b"%08x" % zlib.crc32(text) + text.ljust(RECORD - _CHECK)


def decode(place: bytes) -> Record | None:
    """Return the record in its place; None if there is none, or if it is torn or damaged."""
    try:
        text = place[_CHECK:RECORD].rstrip()
        if int(place[:_CHECK], 16) != zlib.crc32(text):
            return None
        number, key, label, world_size, rank, *positions = json.loads(text)
    except ValueError:
        return None
    return Record(Generation(number, key, label, world_size), rank, *positions)


def newest(records: Iterable[Record], workers: int | None = None) -> Generation | None:
    """Return the newest generation that all of its ranks have, or all workers of a node; None if there is none."""
    ranks: dict[Generation, set[int]] = {}
    for record in records:
        ranks.setdefault(record.generation, set()).add(record.rank)
    whole = [one for one, there in ranks.items() if len(there) == min(one.world_size, workers or one.world_size)]
    return max(whole, key=lambda one: one.number, default=None)


def choose_half(records: Sequence[Record | None], kept: str) -> int:
    """Return the half for the next generation: never that of the one with the key `kept`, else the older one."""
    ages = [(False, -1) if one is None else (one.generation.key == kept, one.generation.number) for one in records]
    return ages.index(min(ages))
