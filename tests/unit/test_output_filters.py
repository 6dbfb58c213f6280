"""The duplicate filters: whole matching lines, also of lines that come in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from elastic_run.multiprocessing.output.outlet import Lines
from elastic_run.multiprocessing.output.sink import FilteredCopy, LogFile
from elastic_run.multiprocessing.output.wiring import open_log
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.loop import Loop


def copy_of(tmp_path: Path, filters: list[str], *takes: tuple[str, bytes]) -> bytes:
    """Give pieces of sources, each with the prefix ``SOURCE>``, to a copy; return its file."""
    path = tmp_path / "filtered.log"
    losses: list[OSError] = []
    copy = FilteredCopy(LogFile(open_log(str(path)), losses.append), filters)
    for source, data in takes:
        copy.take(source, f"{source}>".encode(), data)
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
        ([b"apple"], b"a>apple"),
    ],
)
def test_parts_of_a_long_line_follow_the_first(tmp_path: Path, parts: list[bytes], expected: bytes) -> None:
    """Of a line in parts the first part decides, and the rest goes with it under one prefix."""
    assert copy_of(tmp_path, ["apple"], *(("a", part) for part in parts)) == expected


@pytest.mark.parametrize("limit", [4, 100])
def test_a_line_that_its_source_leaves_unfinished_is_ended(tmp_path: Path, limit: int) -> None:
    """In the file as on the console, also of a long line that was copied in parts."""
    path = tmp_path / "filtered.log"
    copy = FilteredCopy(LogFile(open_log(str(path)), lambda _: None), ["apple"])
    bench = Bench()
    lines = Lines(cast("Loop", bench.loop), bench.stream, b"a>", limit=limit, copy=copy)
    for data in (b"one\napple ", b"pie"):
        lines.take(data)
    lines.end()
    copy.close()
    assert path.read_bytes() == b"a>apple pie\n"
    assert bench.got == b"a>one\na>apple pie\n"
