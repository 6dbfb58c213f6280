"""Which generation of a kept state may be loaded, and which half of a memory the next one may overwrite."""

from __future__ import annotations

import pytest

from elastic_run.core.kept_generations import (
    HEADER,
    Generation,
    Record,
    choose_half,
    decode,
    encode,
    half_of,
    newest,
    read_size,
)


def _record(number: int, rank: int, *, key: str = "k", size: int = 2) -> Record:
    return Record(Generation(number, key, f"{number}", size), rank, HEADER, HEADER, 2, 3)


def test_a_record_survives_and_damage_is_seen() -> None:
    """A record is read as it was written; a torn, cleared or changed one is none."""
    record = _record(7, 1)
    place = encode(record)
    assert decode(place) == record
    assert record.length == HEADER + 2
    assert decode(bytes(len(place))) is None
    assert decode(place[:100] + bytes(len(place) - 100)) is None
    assert decode(place.replace(b'"7"', b'"8"')) is None


def test_the_halves_lie_apart() -> None:
    """Both halves have the same size, begin after the records, and end within the memory."""
    (first, middle), (second, end) = half_of(1 << 20, 0), half_of(1 << 20, 1)
    assert (first, middle - first) == (HEADER, end - second)
    assert middle <= second
    assert end <= 1 << 20


@pytest.mark.parametrize(
    ("records", "number"),
    [
        ([], None),
        ([_record(1, 0)], None),
        ([_record(1, 0), _record(1, 1)], 1),
        ([_record(1, 0), _record(1, 1), _record(2, 0)], 1),
        ([_record(1, 0), _record(1, 1), _record(2, 0), _record(2, 1)], 2),
        ([_record(2, 0, key="a"), _record(2, 1, key="b")], None),
        ([_record(3, 0, size=1), _record(2, 0), _record(2, 1)], 3),
        ([_record(1, 0), _record(1, 0)], None),
    ],
)
def test_a_generation_counts_when_all_ranks_have_it(records: list[Record], number: int | None) -> None:
    """The newest generation of which each rank has its part, all under one key, is loaded."""
    found = newest(records)
    assert (found and found.number) == number


def test_a_node_has_a_generation_when_its_workers_have_it() -> None:
    """Its status names the newest generation of its own workers, which may be more than those that saved."""
    assert newest([_record(1, 2, size=4)], 2) is None
    assert newest([_record(1, 2, size=4), _record(1, 3, size=4)], 2) == _record(1, 0, size=4).generation
    assert newest([_record(1, 0, size=1)], 2) == _record(1, 0, size=1).generation


def test_the_whole_generation_is_not_overwritten() -> None:
    """The next one goes into the other half, also if that has a newer one that others lack; else into the older one."""
    one, two = _record(1, 0, key="one"), _record(2, 0, key="two")
    assert choose_half([one, two], "one") == 1
    assert choose_half([one, two], "two") == 0
    assert choose_half([one, None], "") == 1
    assert choose_half([two, one], "") == 1
    assert choose_half([two, one], "three") == 1
    assert choose_half([None, None], "") == 0


@pytest.mark.parametrize(("text", "size"), [("auto", 0), ("64GB", 64 * 10**9), ("3KiB", 3072), ("1TB", 10**12)])
def test_a_size_has_a_unit(text: str, size: int) -> None:
    """Units are powers of 1000 or of 1024."""
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["64", "GB", "-1GB", "0GB", "1.5GB", "6 GB", "4Gi", "1GBB", "\u0663GB"])
def test_other_sizes_are_refused(text: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ValueError, match="is neither auto nor a size with a unit"):
        read_size(text)
