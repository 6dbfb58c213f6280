"""Equal KeyboardInterrupts of several workers, shown once."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from elastic_run.multiprocessing.output.console import QUEUE_LIMIT
from elastic_run.multiprocessing.output.sink import Backlog, LogFile
from elastic_run.multiprocessing.output.sources import InterruptFold
from elastic_run.multiprocessing.output.wiring import open_log
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.loop import Loop

_TRACE = (
    b'Traceback (most recent call last):\n  File "/x/train.py", line 5, in <module>\n    step()\nKeyboardInterrupt\n'
)
_OTHER = _TRACE.replace(b"line 5", b"line 9")
_LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"
_CHAIN = _TRACE.replace(b"KeyboardInterrupt", b"queue.Empty") + _LINK + _TRACE
_COLOURED = _TRACE.replace(b"KeyboardInterrupt", b"\x1b[1;35mKeyboardInterrupt\x1b[0m")


def show(*streams: tuple[bytes, ...]) -> tuple[bytes, list[tuple[str, list[int]]]]:
    """Let ranks write pieces, one rank after the other, and end; return the console and what was folded."""
    bench = Bench()
    sources = [bench.pass_through() for _ in streams]
    fold = InterruptFold(cast("Loop", bench.loop), {source: rank for rank, source in enumerate(sources)})
    for source, pieces in zip(sources, streams, strict=True):
        for piece in pieces:
            fold.add(source, piece)
        fold.release(source)
        source.end()
        bench.loop.turn()
    return bytes(bench.got), fold.list_folded()


@pytest.mark.parametrize("text", [_TRACE, _CHAIN, _COLOURED], ids=["plain", "chain", "colours"])
def test_equal_interrupts_are_shown_once(text: bytes) -> None:
    """The traceback of the first worker is shown, and the ranks that have the same one are known."""
    assert show((text,), (text,), (text,)) == (text, [("train.py:5", [0, 1, 2])])


def test_different_interrupts_are_all_shown() -> None:
    """Two workers that were interrupted at different places show two tracebacks."""
    assert show((_TRACE,), (_OTHER,), (_OTHER,)) == (_TRACE + _OTHER, [("train.py:9", [1, 2])])


@pytest.mark.parametrize(
    "text",
    [_TRACE.replace(b"KeyboardInterrupt", b"ValueError: no"), _TRACE + _LINK + b"x\n", b"text\n", _TRACE[:-30]],
    ids=["error", "link", "text", "part"],
)
def test_other_text_stays(text: bytes) -> None:
    """What is no KeyboardInterrupt's traceback is shown for each worker."""
    shown, _ = show((text,), (text,))
    assert shown.count(text[-20:]) == 2


def test_text_around_stays_in_its_place() -> None:
    """Bytes before and after a traceback that is left out are shown, in their order."""
    shown, _ = show((_TRACE,), (b"bar 40%", _TRACE[:50], _TRACE[50:], b"saved\n"))
    assert shown == _TRACE + b"bar 40%saved\n"


def test_a_long_text_keeps_its_order() -> None:
    """Text before a first line stays before it, though so much follows in the same piece that it can't be held."""
    text = b"bar 40%\n" + _TRACE[:50] + b"x" * (1 << 17) + b"\n"
    shown, _ = show((text,))
    assert shown == text


def test_a_tee_that_is_behind_shows_every_byte(tmp_path: Path) -> None:
    """A traceback that comes while the console catches up from the log file is shown in its place."""
    bench = Bench()
    log = LogFile(open_log(str(tmp_path / "log")), lambda _: None)
    source = bench.lines(b"", backlog=Backlog(log))
    fold = InterruptFold(cast("Loop", bench.loop), {source: 0})
    bench.reader.room = 0
    for piece in (b"x" * QUEUE_LIMIT, b"y" * QUEUE_LIMIT):
        log.write(piece)
        fold.add(source, piece)
    bench.reader.room = 1 << 30
    (drain,) = bench.loop.writers.values()
    drain()
    for piece in (b"end\nbar 40%\n" + _TRACE, b"saved\n"):
        log.write(piece)
        fold.add(source, piece)
    bench.loop.turn()
    fold.release(source)
    source.end()
    bench.loop.turn()
    log.close()
    assert bench.got == (tmp_path / "log").read_bytes()


def test_a_worker_that_goes_on_is_shown_after_half_a_second() -> None:
    """A program that lives on after a traceback is not held: its lines are shown while it runs."""
    bench = Bench()
    source = bench.pass_through()
    fold = InterruptFold(cast("Loop", bench.loop), {source: 0})
    fold.add(source, _TRACE[:40])
    assert bench.got == b""
    bench.loop.advance(0.6)
    assert bench.got == _TRACE[:40]
    fold.add(source, _TRACE[40:])
    assert bench.got == _TRACE
