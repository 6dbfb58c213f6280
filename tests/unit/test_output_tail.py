"""The end of a stream that is kept for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.multiprocessing.output import tail
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


@pytest.mark.parametrize("end", ["\n", "\r"])
@pytest.mark.parametrize("size", [1000, 1 << 18])
def test_a_program_that_lived_on_may_not_have_died_of_its_last_exception(end: str, size: int) -> None:
    """A traceback is kept whatever comes after it; behind many lines, or progress bars, it isn't certain."""
    bars = "".join(f" 50%|#### {number}/9{end}" for number in range(20_000))
    for text in (f"{_HEAD}KeyError: 'a'\n{bars}", f"{_HEAD}KeyError: 'a'\n{'word ' * 30_000}{bars}"):
        exception = parse_exception(kept(text, size), exitcode=1)
        assert exception is not None
        assert (exception.summary, exception.is_certain) == ("KeyError: 'a'", False)
        assert parse_exception(kept(text, size), exitcode=3) is None


def test_the_end_of_a_file_is_read_the_same_way(tmp_path: Path) -> None:
    """A log file that a worker wrote itself tells its exception, however long; what isn't there tells nothing."""
    path = tmp_path / "stderr.log"
    path.write_text("line\n" * 500_000 + f"{_HEAD}ValueError: {'x' * 500_000}\n")
    exception = parse_exception(read_tail(str(path)).decode(), exitcode=1)
    assert exception is not None
    assert exception.type == "ValueError"
    assert read_tail(str(tmp_path / "none")) == b""


_FRAMES = '  File "train.py", line 3, in <module>\n    main()\n  File "model.py", line 7, in load\n    read()\n'
_CHAINED = "\nThe above exception was the direct cause of the following exception:\n\n"
_GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  |     main()
  | ExceptionGroup: loading failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "load.py", line 9, in read
    |     raise OSError(5)
    | OSError: [Errno 5] first
    +---------------- 2 ----------------
    | OSError: [Errno 5] second
    +------------------------------------
"""
_BARS = "".join(f"\r 50%|\u2588\u2588 {number}/9" for number in range(200))
_DEEP = "".join(f'  File "deep.py", line {number}, in f{number}\n    f{number + 1}()\n' for number in range(5_000))
_NOISE = "".join(f"step {number}\nloss: 3\n" for number in range(2_000))


def raised(*parts: str) -> str:
    """Return a traceback made of parts."""
    return "Traceback (most recent call last):\n" + "".join(parts)


def prefixed(text: str) -> str:
    """Return a text as torch's own hook writes it."""
    return "".join(f"[rank3]: {line}\n" for line in text.splitlines())


#: A text -> the exception's first line, where it was raised, and what it came from.
_KEPT = {
    raised(_FRAMES, "ValueError: x\n"): ("ValueError: x", "model.py:7 in load", ""),
    raised(_NOISE, _FRAMES, _NOISE, "ValueError: x\n"): ("ValueError: x", "model.py:7 in load", ""),
    raised(_DEEP, "zlib.error: x\n"): ("zlib.error: x", "deep.py:4999 in f4999", ""),
    raised(_FRAMES, "ValueError: x\n").replace("Trace", _BARS + "Trace"): ("ValueError: x", "model.py:7 in load", ""),
    prefixed(raised(_FRAMES, "ValueError: x\n", "more\n" * 9)): ("ValueError: x", "model.py:7 in load", ""),
    raised(_FRAMES, "OSError: full\n", _CHAINED) + raised(_FRAMES, "ValueError: x\n"): (
        "ValueError: x",
        "model.py:7 in load",
        "OSError: full",
    ),
    prefixed(raised(_FRAMES, "OSError: ", "y" * 100_000, "\n", _CHAINED) + raised(_FRAMES, "ValueError: x\n")): (
        "ValueError: x",
        "model.py:7 in load",
        "OSError: yyy",
    ),
    _CHAINED.join(raised(_FRAMES, f"OSError: {step}\n") for step in range(40)): (
        "OSError: 39",
        "model.py:7 in load",
        "OSError: 0 (by way of OSError: 38)",
    ),
    _GROUP: ("ExceptionGroup: loading failed (2 sub-exceptions)", "train.py:3", "OSError: [Errno 5] first"),
    raised(_FRAMES, "KeyError: old\n") + "step\n" * 20_000 + raised(_FRAMES, "ValueError: x\n"): (
        "ValueError: x",
        "model.py:7 in load",
        "",
    ),
    raised(_FRAMES, "ValueError: x\n")
    + "step\n" * 20_000
    + "Exception ignored in: <f>\n"
    + raised(_FRAMES, "E: y\n"): (
        "ValueError: x",
        "model.py:7 in load",
        "",
    ),
}


@pytest.mark.parametrize("size", [7, 1000, 1 << 16, 1 << 18])
@pytest.mark.parametrize("text", _KEPT, ids=range(len(_KEPT)))
@pytest.mark.parametrize("after", ["step 7\n", " 50%|## 4/9\r", "\u20ac"])
def test_an_exception_is_kept_whatever_follows_it(text: str, size: int, after: str) -> None:
    """With its place and what it came from, between the lines of others and behind thousands of frames."""
    said = kept(text + after * 60_000, size)
    assert len(said) < 2 * contract.CAPTURE_BYTES
    exception = parse_exception(said, exitcode=1)
    assert exception is not None
    summary, where, cause = _KEPT[text]
    assert (exception.summary, exception.where) == (summary, where)
    assert exception.cause.startswith(cause)
    assert bool(exception.cause) == bool(cause)


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


@pytest.mark.parametrize(
    ("word", "is_adjacent", "expected"),
    [
        (b"ValueError", False, True),
        (b"module.Stop", True, True),
        (b"Stop", True, True),
        (b"_Stop", True, True),
        (b"stop", True, False),
        (b"_Stop", False, False),
        (b"two words", True, False),
    ],
)
def test_what_names_an_exception(word: bytes, *, is_adjacent: bool, expected: bool) -> None:
    """Behind the frames any name of a class does, elsewhere one that no other word of a log ends with."""
    assert tail._names_exception(word, is_adjacent=is_adjacent) is expected
