"""The duplicate filters: whole matching lines, and the interrupts of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from elastic_run.multiprocessing.output.sink import LogFile
from elastic_run.multiprocessing.output.sources import FilteredCopy, Lines
from elastic_run.multiprocessing.output.wiring import open_log
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.loop import Loop


def test_whole_lines_with_a_text_are_copied_with_their_prefix(tmp_path: Path) -> None:
    """A line with any of the texts in it is copied, also where it comes in pieces or without an end; others are not."""
    path, bench = tmp_path / "filtered.log", Bench()
    copy = FilteredCopy(LogFile(open_log(str(path)), lambda _: None), ["apple", "pear"])
    for prefix, pieces in ((b"a>", (b"an ap", b"ple\nnothing\na p")), (b"b>", (b"\xff pear\nx\napple",))):
        lines = Lines(cast("Loop", bench.loop), bench.stream, prefix, limit=100, copy=copy)
        for data in pieces:
            lines.add(data)
        bench.loop.advance(1.0)  # a pause is no end of a line
        lines.add(b"ear")
        lines.end()
    copy.close()
    assert path.read_bytes() == b"a>an apple\na>a pear\nb>\xff pear\nb>appleear\n"
    assert bench.got == b"a>an apple\na>nothing\na>a pear\nb>\xff pear\nb>x\nb>appleear\n"
