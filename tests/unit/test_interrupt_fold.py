"""Equal KeyboardInterrupts of several workers, shown once."""

from __future__ import annotations

import pytest

from elastic_run.multiprocessing.output.outlet import InterruptFold
from tests.support.stream_bench import Bench

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
    fold = InterruptFold()
    for rank, pieces in enumerate(streams):
        outlet = bench.pass_through()
        outlet.fold(fold, rank)
        for piece in pieces:
            outlet.take(piece)
        outlet.end()
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


def test_a_worker_that_goes_on_is_shown_after_half_a_second() -> None:
    """A program that lives on after a traceback is not held: its lines are shown while it runs."""
    bench = Bench()
    outlet = bench.pass_through()
    outlet.fold(InterruptFold(), 0)
    outlet.take(_TRACE[:40])
    assert bench.got == b""
    bench.loop.advance(0.6)
    assert bench.got == _TRACE[:40]
    outlet.take(_TRACE[40:])
    assert bench.got == _TRACE
