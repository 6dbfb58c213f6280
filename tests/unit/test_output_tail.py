"""The end of a stream that is kept for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.multiprocessing.output.tail import Tail, read_tail

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
