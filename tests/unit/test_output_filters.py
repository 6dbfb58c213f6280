"""The duplicate filters: whole matching lines, also of lines that come in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.descriptors import open_log
from elastic_run.multiprocessing.output.filters import FilteredCopy
from elastic_run.multiprocessing.output.logfile import LogFile

if TYPE_CHECKING:
    from pathlib import Path


def copy_of(tmp_path: Path, filters: list[str], *takes: tuple[str, bytes]) -> bytes:
    """Give pieces of sources, each with the prefix ``SOURCE>``, to a copy; return its file."""
    path = tmp_path / "filtered.log"
    losses: list[OSError] = []
    copy = FilteredCopy(LogFile(open_log(str(path)), losses.append), filters)
    for source, data in takes:
        copy.take(source, f"{source}>".encode(), data)
    for source in {source for source, _ in takes}:
        copy.end(source)
    copy.close()
    assert not losses
    return path.read_bytes()


def test_matching_lines_are_copied(tmp_path: Path) -> None:
    """A line with any of the texts in it is copied with its prefix, other lines are not."""
    data = b"an apple\nnothing\na pear\n\xff apple\n"
    assert copy_of(tmp_path, ["apple", "pear"], ("a", data)) == b"a>an apple\na>a pear\na>\xff apple\n"


def test_no_match_writes_nothing(tmp_path: Path) -> None:
    """A batch without any of the texts leaves the file empty."""
    assert copy_of(tmp_path, ["apple"], ("a", b"one\ntwo\n")) == b""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"apple ", b"pie ", b"end\nnext\n"], b"a>apple pie end\n"),
        ([b"pear ", b"apple ", b"end\nnext\n"], b""),
        ([b"one\napple ", b"end\napple\n"], b"a>apple end\na>apple\n"),
        ([b"apple ", b"\n", b"x\n"], b"a>apple \n"),
        ([b"apple"], b"a>apple\n"),
    ],
)
def test_parts_of_a_long_line_follow_the_first(tmp_path: Path, parts: list[bytes], expected: bytes) -> None:
    """Of a line in parts the first part decides, and the rest goes with it under one prefix."""
    assert copy_of(tmp_path, ["apple"], *(("a", part) for part in parts)) == expected
