"""The layout of the memory in which one worker keeps its training state, and which state may be loaded from it. Pure.

A memory has a page of records and two halves. A generation of the state is written into one half: the tensors as raw
bytes, then an index of them. The half's record is cleared before and written last, so that a worker that is killed in
between leaves no record, and the generation in the other half is untouched.

A generation counts when all ranks have it: the ranks of a world write one generation under one key, and a key with a
rank missing is not loaded. Ranks of different keys are never mixed.
"""

from __future__ import annotations

import json
import zlib

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeVar

    Kept = TypeVar("Kept")

__all__ = [
    "HALVES",
    "HEADER",
    "RECORD",
    "Generation",
    "Record",
    "choose_half",
    "decode",
    "encode",
    "half_of",
    "newest",
    "read_size",
]

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
    """One state of all ranks.

    Args:
        number: Counts the generations of the job.
        key: Random, made by the rank that coordinated the save: two saves never have the same one.
        label: The user's name for it, such as the step.
        world_size: Ranks that wrote it.
    """

    number: int
    key: str
    label: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one half of a memory holds. Positions count bytes from `start`, so that a copy may lie in another half.

    Args:
        generation: The generation.
        rank: The rank whose part this is.
        start: The first byte of the half, from the beginning of the memory.
        index_start: Where the index begins, behind the tensors.
        index_length: Its length in bytes.
        index_check: CRC-32 of the index.
        checks_length: The length of the tensors' checksums, which follow the index; 0 until they are computed.
        checks_check: CRC-32 of these.
        saved_at: Monotonic seconds of this machine when it was written, for display.
    """

    generation: Generation
    rank: int
    start: int
    index_start: int
    index_length: int
    index_check: int
    checks_length: int = 0
    checks_check: int = 0
    saved_at: float = 0.0

    @property
    def length(self) -> int:
        """The bytes of tensors, index and checksums."""
        return self.index_start + self.index_length + self.checks_length


def read_size(text: str) -> int:
    """Return the bytes of --keep-state: a whole number with one of the units KB to TB (powers of 1000) or KiB to TiB.

    Returns:
        The bytes; 0 for `auto`.

    Raises:
        ValueError: It is neither.
    """
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
    """Return a record as the bytes of its place.

    Raises:
        ValueError: The label is too long.
    """
    one = record.generation
    values = (one.number, one.key, one.label, one.world_size, record.rank, record.start, record.index_start)
    checks = (record.index_length, record.index_check, record.checks_length, record.checks_check, record.saved_at)
    text = json.dumps((*values, *checks)).encode()
    if len(text) > RECORD - _CHECK:
        message = f"a label of {len(one.label)} characters is too long"
        raise ValueError(message)
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


def newest(records: Iterable[Record]) -> Generation | None:
    """Return the newest generation that all of its ranks have, or None if there is none."""
    ranks: dict[Generation, set[int]] = {}
    for record in records:
        ranks.setdefault(record.generation, set()).add(record.rank)
    whole = [one for one, there in ranks.items() if len(there) == one.world_size]
    return max(whole, key=lambda one: one.number, default=None)


def choose_half(records: Sequence[Record | None], whole: Generation | None) -> int:
    """Return the half for the next generation: never that of the newest one that is whole.

    Args:
        records: Those of both halves.
        whole: The newest generation that all ranks have, or None.
    """
    if whole is not None:
        for half, record in enumerate(records):
            if record is not None and record.generation == whole:
                return 1 - half
    return min(range(HALVES), key=lambda half: -1 if (found := records[half]) is None else found.generation.number)
