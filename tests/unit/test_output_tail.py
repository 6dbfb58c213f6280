"""The end of a stream that is kept for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.core.rootcause import parse_exception
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
    return tail.read().decode()


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


@pytest.mark.parametrize("cut", range(-40, 41, 8))
def test_a_beginning_is_found_wherever_the_window_ends(cut: int) -> None:
    """Also where the edge goes through the traceback's first line."""
    text = f"{_HEAD}KeyError: {'y' * (contract.CAPTURE_BYTES - len(_HEAD) + cut)}\n"
    exception = parse_exception(kept("z" * 200_000 + "\n" + text, 1 << 12), exitcode=1)
    assert exception is not None
    assert exception.type == "KeyError"


@pytest.mark.parametrize("end", ["\n", "\r"])
@pytest.mark.parametrize("size", [1000, 1 << 18])
def test_a_program_that_lived_on_did_not_die_of_what_it_logged(end: str, size: int) -> None:
    """A traceback of long ago is forgotten with the lines, or the progress bars, that came after it."""
    text = f"{_HEAD}KeyError: 'a'\n" + "".join(f" 50%|#### {number}/9{end}" for number in range(20_000))
    assert "KeyError" not in kept(text, size)
    few = (
        f"{_HEAD}KeyError: 'a'\n" + "word " * 30_000 + "".join(f" 50%|#### {number}/9{end}" for number in range(9_000))
    )
    assert "KeyError" not in kept(few, size)


def test_the_end_of_a_file_is_read_the_same_way(tmp_path: Path) -> None:
    """A log file that a worker wrote itself tells its exception, however long; what isn't there tells nothing."""
    path = tmp_path / "stderr.log"
    path.write_text("line\n" * 500_000 + f"{_HEAD}ValueError: {'x' * 500_000}\n")
    exception = parse_exception(read_tail(str(path)).decode(), exitcode=1)
    assert exception is not None
    assert exception.type == "ValueError"
    assert read_tail(str(tmp_path / "none")) == b""
