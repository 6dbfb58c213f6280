"""Parts of the output: what is kept, when a worker has last written, filters, sinks, the rewritten line."""

from __future__ import annotations

import os
import pty
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run import contract
from elastic_run.agent.driver.worker_readings import find_output
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.multiprocessing.output.sink import CautiousSink, FilteredCopy, LogFile
from elastic_run.multiprocessing.output.tail import Tail, read_tail
from elastic_run.multiprocessing.wiring import open_log
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_run.agent.driver.round import Round


# --- the end of a stream that is kept for the report ------------------------------------------------------------------
_HEAD = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def pieces(text: str, size: int) -> Iterator[bytes]:
    """Yield a text in parts of a size."""
    data = text.encode()
    yield from (data[start : start + size] for start in range(0, len(data), size))


def kept(text: str, size: int) -> str:
    """Return what is kept of a text that comes in parts of a size."""
    tail = Tail()
    for piece in pieces(text, size):
        tail.add(piece)
    return tail.read().decode(errors="replace")


@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 18])
def test_the_end_is_kept(size: int) -> None:
    """Of any amount of lines it is the last 64 KiB, however they come."""
    text = "".join(f"line {number}\n" for number in range(60_000))
    assert kept(text, size) == text[-contract.CAPTURE_BYTES :]
    assert kept("short", size) == "short"


@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 18])
@pytest.mark.parametrize("length", [65_000, 70_000, 150_000, 3_000_000])
def test_the_beginning_of_a_long_exception_is_kept(length: int, size: int) -> None:
    """An exception has its type, place and first words, though its message is longer than what is kept."""
    text = f"before\n{_HEAD}RuntimeError: missing keys {'x' * length} end\n"
    said = kept(text, size)
    assert len(said) < contract.CAPTURE_BYTES + (1 << 15)
    exception = parse_exception(said, exitcode=1)
    assert exception is not None
    assert (exception.type, exception.where) == ("RuntimeError", "train.py:3")
    assert exception.message.startswith("missing keys x")
    assert said.endswith("x end\n")


def test_the_end_of_a_file_is_read_the_same_way(tmp_path: Path) -> None:
    """A log file that a worker wrote itself tells its exception, however long; what isn't there tells nothing."""
    path = tmp_path / "stderr.log"
    path.write_text("line\n" * 500_000 + f"{_HEAD}ValueError: {'x' * 500_000}\n")
    exception = parse_exception(read_tail(str(path)).decode(), exitcode=1)
    assert exception is not None
    assert exception.type == "ValueError"
    assert read_tail(str(tmp_path / "none")) == b""


_FRAMES = '  File "train.py", line 3, in <module>\n    main()\n  File "model.py", line 7, in load\n    read()\n'


def raised(*parts: str) -> str:
    """Return a traceback made of parts."""
    return "Traceback (most recent call last):\n" + "".join(parts)


@pytest.mark.parametrize("length", [2 << 20, 40 << 20])
def test_the_exception_of_a_large_file_is_found(tmp_path: Path, length: int) -> None:
    """Wherever in it: also where a part that is searched ends within the first line of the traceback."""
    path = tmp_path / "stderr.log"
    line = b"step 1234567890\n"
    for cut in (0, 10, 40, 500_000):
        text = raised(_FRAMES, "ValueError: x\n").encode()
        path.write_bytes(line * (1 << 15) + text + (line * (length // len(line) + 1))[cut : cut + length - len(text)])
        exception = parse_exception(read_tail(str(path)).decode(errors="replace"), exitcode=1)
        assert exception is not None
        assert (exception.summary, exception.is_certain) == ("ValueError: x", False)
        assert parse_exception(read_tail(str(path), is_thorough=False).decode(errors="replace"), exitcode=1) is None


# --- when a worker has last written, and what -------------------------------------------------------------------------
_NOW = 1000.0


def _find(path: Path, *, seen: tuple[float, str] | None, written: float | None) -> tuple[float | None, str]:
    """Return what is found of a worker that was seen, and whose file was written, so many seconds ago."""
    activities: dict[int, Any] = {}
    if seen is not None:
        activities[0] = SimpleNamespace(last=_NOW - seen[0], last_line=seen[1])
    if written is not None:
        path.write_text("first\nof the file\n")
        moment = time.time() - written
        os.utime(path, (moment, moment))
    current = SimpleNamespace(
        started=_NOW - 90.0,
        output=SimpleNamespace(activities=activities),
        output_files=lambda _: [str(path)],
        sees_stdout=lambda _: True,
    )
    return find_output(cast("Round", current), 0, _NOW)


@pytest.mark.parametrize(
    ("seen", "written", "silence", "line"),
    [
        (None, None, 90.0, ""),
        (None, 30.0, 30.0, "of the file"),
        ((20.0, "as seen"), None, 20.0, "as seen"),
        ((20.0, "as seen"), 30.0, 20.0, "as seen"),
        ((20.0, "as seen"), 10.0, 10.0, "of the file"),
        ((20.0, ""), 30.0, 20.0, "of the file"),
    ],
)
def test_the_later_output_counts(
    seen: tuple[float, str] | None, written: float | None, silence: float, line: str, tmp_path: Path
) -> None:
    """The line of a file counts also if the output that was seen since has none."""
    found, told = _find(tmp_path / "stderr.log", seen=seen, written=written)
    assert found == pytest.approx(silence, abs=5.0)
    assert told == line


# --- duplicate filters ------------------------------------------------------------------------------------------------
def test_whole_lines_with_a_text_are_copied_with_their_prefix(tmp_path: Path) -> None:
    """A line with any of the texts in it is copied, also where it comes in pieces or without an end; others are not."""
    path, bench = tmp_path / "filtered.log", Bench()
    copy = FilteredCopy(LogFile(open_log(str(path)), lambda _: None), ["apple", "pear"])
    for prefix, pieces in ((b"a>", (b"an ap", b"ple\nnothing\na p")), (b"b>", (b"\xff pear\nx\napple",))):
        lines = bench.teed(prefix, copy=copy)
        for data in pieces:
            lines.add(data)
        bench.loop.advance(1.0)  # a pause is no end of a line
        lines.add(b"ear")
        lines.end()
    copy.close()
    assert path.read_bytes() == b"a>an apple\na>a pear\nb>\xff pear\nb>appleear\n"
    assert bench.got == b"a>an apple\na>nothing\na>a pear\nb>\xff pear\nb>x\nb>appleear\n"


# --- a descriptor that cannot be opened again -------------------------------------------------------------------------
@pytest.mark.parametrize("offset", range(0, 260, 20))
def test_a_terminal_that_nobody_reads(offset: int) -> None:
    """A terminal that fills up never takes a part of a step: the launcher would wait there until somebody reads."""
    reading, writing = pty.openpty()
    os.write(writing, b"x" * offset)
    sink = CautiousSink(writing)
    taken: list[int] = []
    data = b"".join(b"%09d\n\tdone\r\xc3\xa9\n" % number for number in range(4000))

    def fill() -> None:
        try:
            while True:
                taken.append(sink.write(data[sum(taken) :]))
        except OSError:
            pass  # it is full, or the test has closed the other end

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(10)
    has_returned = not thread.is_alive()
    os.close(reading)
    thread.join()
    os.close(writing)
    assert has_returned
    assert 0 < sum(taken) < len(data)


# --- the line that is rewritten while nodes are awaited ---------------------------------------------------------------
_ERASED = b"\r\x1b[J"


def test_the_line_goes_when_something_is_written() -> None:
    """And when it is hidden, once."""
    bench = Bench()
    assert bench.stream.show_line(b"waiting for 2 nodes")
    assert bench.got == b"\rwaiting for 2 nodes\x1b[J\r"
    bench.stream.hide_line()
    bench.stream.hide_line()
    assert bench.got == b"\rwaiting for 2 nodes\x1b[J\r" + _ERASED
    assert bench.stream.show_line(b"waiting for 1 node")
    bench.reader.got = b""
    source = bench.teed(b"")
    source.add(b"a line\n")
    assert bench.got == _ERASED + b"a line\n"


def test_no_line_is_shown_within_a_line_of_a_worker() -> None:
    """Nor while the terminal takes nothing."""
    bench = Bench()
    bench.captured().add(b"half a line")
    assert not bench.stream.show_line(b"waiting for 2 nodes")
    assert bench.got == b"half a line"
