"""Equal lines of several ranks that are shown once: what is decided, by the test's own clock, and what is shown."""

from __future__ import annotations

import os
import random
import re
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.console import QUEUE_LIMIT
from elastic_run.multiprocessing.output.fold import HOLD, MOST_HELD, SETTLE, Fold
from elastic_run.multiprocessing.output.sink import LogFile
from elastic_run.multiprocessing.output.worker_lines import FoldedOutput
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.multiprocessing.output.fold import Block

_WARNING = b"/x/train.py:3: UserWarning: slow\n  warnings.warn('slow')\n"
_TRACE = b'Traceback (most recent call last):\n  File "/x/train.py", line 5, in <module>\n    step()\n'
_ERROR = _TRACE + b"ValueError: no\n"
_CHAIN = _ERROR + b"\nDuring handling of the above exception, another exception occurred:\n\n" + _ERROR


def told(blocks: list[Block]) -> list[tuple[list[int], bytes]]:
    """Return the ranks and the text of blocks."""
    return [(sorted(block.raws), block.text) for block in blocks]


@pytest.mark.parametrize("text", [b"line\n", _WARNING, _ERROR, _CHAIN], ids=["line", "warning", "error", "chain"])
@pytest.mark.parametrize("size", [10_000, 20])
def test_a_block_of_all_ranks_is_shown_once(text: bytes, size: int) -> None:
    """As soon as the last rank has been silent for a moment, also where each rank writes it in several pieces."""
    fold = Fold(range(8))
    pieces = [text] if size > len(text) else text.splitlines(keepends=True)
    for rank in range(8):
        for piece in pieces:
            assert fold.add(0.001 * rank, rank, piece) == []
    assert fold.expire(0.008) == []
    assert fold.deadline == pytest.approx(SETTLE)
    shown = [block for at in range(8, 30) for block in fold.expire(0.001 * at)]
    assert told(shown) == [([*range(8)], text)]
    assert fold.is_empty


def test_a_rank_that_differs_is_shown_for_itself() -> None:
    """In one character; the others are shown once."""
    fold = Fold(range(4))
    for rank in range(4):
        fold.add(0.0, rank, _ERROR.replace(b"no", b"n0") if rank == 2 else _ERROR)
    assert told(fold.expire(HOLD)) == [([0, 1, 3], _ERROR), ([2], _ERROR.replace(b"no", b"n0"))]


def test_a_slow_rank_is_not_awaited() -> None:
    """For longer than 0.2 s from the first line; then it is shown for itself."""
    fold = Fold(range(3))
    fold.add(0.0, 0, b"line\n")
    fold.add(0.1, 1, b"line\n")
    assert fold.expire(0.15) == []
    assert fold.deadline == HOLD
    assert told(fold.expire(HOLD)) == [([0, 1], b"line\n")]
    assert fold.is_empty
    fold.add(0.3, 2, b"line\n")
    assert told(fold.expire(0.5)) == [([2], b"line\n")]


def test_torchs_prefix_is_no_part_of_a_line() -> None:
    """`[rank3]:` of the rank itself is left out; the prefix of another rank is text."""
    fold = Fold(range(2))
    shown = []
    for rank in range(2):
        prefix = b"[rank%d]: " % rank
        shown += fold.add(0.0, rank, prefix + _ERROR[:-1].replace(b"\n", b"\n" + prefix) + b"\n[rank0]: of 0\n")
    assert told(shown + fold.flush()) == [([0, 1], _ERROR), ([0], b"of 0\n"), ([1], b"[rank0]: of 0\n")]


def test_the_order_within_a_rank_stays() -> None:
    """Lines that two ranks write in another order are not moved."""
    fold = Fold(range(2))
    shown = fold.add(0.0, 0, b"a\nb\n") + fold.add(0.0, 1, b"b\na\n") + fold.flush()
    assert told(shown) == [([0], b"a\n"), ([0, 1], b"b\n"), ([1], b"a\n")]


def test_a_repeated_line_is_shown_as_often_as_each_rank_wrote_it() -> None:
    """Equal lines of one rank are not folded."""
    fold = Fold(range(2))
    shown = fold.add(0.0, 0, b"a\na\n") + fold.add(0.0, 1, b"a\n") + fold.flush()
    assert told(shown) == [([0, 1], b"a\n"), ([0], b"a\n")]


@pytest.mark.parametrize("data", [b"(Pdb) ", b"\r 10%", b"\r 10%\n", b"x" * MOST_HELD + b"\n"])
def test_other_bytes_pass_at_once(data: bytes) -> None:
    """Prompts, progress bars and floods are not held, nor what the same rank wrote before them."""
    fold = Fold(range(2))
    fold.add(0.0, 1, b"line\n")
    fold.add(0.0, 0, b"line\n")
    assert told(fold.add(0.0, 0, data)) == [([0], b"line\n" + data)]
    assert told(fold.flush()) == [([1], b"line\n")]


def test_a_rank_that_writes_alone_is_not_held() -> None:
    """After some lines; its next warning is, and a line that another rank shares makes it one of them again."""
    fold = Fold(range(2))
    for number in range(8):
        fold.add(0.1, 0, b"step %d\n" % number)
    fold.expire(0.4)
    assert told(fold.add(0.5, 0, b"step 9\n")) == [([0], b"step 9\n")]
    for rank in range(2):
        assert fold.add(0.6, rank, _WARNING) == []
    assert told(fold.expire(0.7)) == [([0, 1], _WARNING)]
    assert fold.add(0.8, 0, b"step 10\n") == []


def test_an_ended_rank_is_not_awaited() -> None:
    """What it has written is still compared; its unfinished line is shown."""
    fold = Fold(range(3))
    fold.add(0.0, 0, b"line\n")
    assert fold.end(0) == []
    assert fold.end(1) == []
    fold.add(0.0, 2, b"line\n")
    assert told(fold.end(2)) == [([0, 2], b"line\n")]
    fold = Fold(range(2))
    fold.add(0.0, 0, _TRACE + b"Val")
    assert told(fold.end(0)) == [([0], _TRACE + b"Val")]


# --- what is shown ----------------------------------------------------------------------------------------------------
def make(bench: Bench, count: int, *, file: LogFile | None = None, tees: bool = False) -> FoldedOutput:
    """Return a fold between channels and the console of a bench."""
    channels = {
        rank: bench.teed(b"[default%d]:" % rank, file=file) if tees else bench.captured() for rank in range(count)
    }
    return FoldedOutput(bench.loop, bench.stream, channels)  # type: ignore[arg-type] # a loop of the test's own


def give(folded: FoldedOutput, rank: int, data: bytes) -> None:
    """Let a rank write."""
    folded.take(folded.channels[rank], data)


def test_a_block_stands_behind_its_ranks() -> None:
    """Once, in front of its first line; blank lines stay in front of it."""
    bench = Bench()
    folded = make(bench, 8)
    for rank in range(8):
        give(folded, rank, b"\n" + (b"other\n" if rank == 3 else _WARNING))
    assert bench.got == b""
    bench.loop.advance(HOLD)
    warning = b"\n[ranks 0-2,4-7] " + _WARNING
    assert bench.got == warning + b"\nother\n"
    assert not bench.loop.timers


def test_each_line_of_a_tee_stands_behind_its_ranks() -> None:
    """Where lines have prefixes."""
    bench = Bench()
    folded = make(bench, 2, tees=True)
    for rank in range(2):
        give(folded, rank, _WARNING)
    bench.loop.advance(SETTLE)
    assert bench.got == b"[ranks 0-1] " + _WARNING[:-1].replace(b"\n", b"\n[ranks 0-1] ") + b"\n"


def test_a_line_of_the_launcher_comes_behind_what_is_held() -> None:
    """The console shows all that is held before it."""
    bench = Bench()
    folded = make(bench, 2)
    give(folded, 0, b"last words\n")
    assert bench.stream.flush_held is not None
    bench.stream.flush_held()
    assert bench.got == b"last words\n"
    folded.close()
    assert bench.stream.flush_held is None


def test_a_tee_that_is_behind_shows_every_byte(tmp_path: Path) -> None:
    """What is held when the console gets stuck is shown in its place, before what only the log file has."""
    bench = Bench()
    log = LogFile(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), lambda _: None)
    folded = make(bench, 2, file=log, tees=True)
    sent = b""
    bench.reader.room = 0
    for piece in (b"held\n", b"x" * QUEUE_LIMIT + b"\n", b"y\n", b"z" * QUEUE_LIMIT + b"\n", b"end\n"):
        log.write(piece)
        give(folded, 0, piece)
        bench.loop.advance(0.1)
        sent += piece
    bench.reader.room = 1 << 30
    bench.loop.drain()
    bench.loop.advance(1.0)
    assert bench.got.replace(b"[default0]:", b"") == sent


_WORDS = [
    b"a\n",
    b"b\n",
    _WARNING,
    _ERROR,
    _CHAIN,
    b"\n",
    b"  x\n",
    b"(Pdb) ",
    b"\r 1%",
    b"\xff\0\n",
    b"x" * 3000 + b"\n",
]
_SHOWN = re.compile(rb"\[ranks ([\d,-]+)\] ")


@pytest.mark.parametrize("seed", range(40))
def test_no_byte_is_lost_or_moved(seed: int) -> None:
    """Nor held for longer than 0.2 s, whatever ranks write, in whatever pieces, at whatever time."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    count = chance.choice([2, 3, 8, 64])
    fold = Fold(range(count))
    common = [chance.choice(_WORDS) for _ in range(20)]
    waiting = {
        rank: b"".join([word if chance.random() < 0.9 else b"rank %d\n" % rank for word in common])
        for rank in range(count)
    }
    sent, shown, now = dict(waiting), dict.fromkeys(waiting, b""), 0.0

    def take(blocks: list[Block]) -> None:
        for block in blocks:
            for rank, raw in block.raws.items():
                shown[rank] += raw

    given: dict[int, list[tuple[float, int]]] = {rank: [] for rank in waiting}
    while waiting:
        rank = chance.choice([*waiting])
        size = chance.choice([1, 40, 500, 5000])
        data, waiting[rank] = waiting[rank][:size], waiting[rank][size:]
        given[rank].append((now, len(sent[rank]) - len(waiting[rank])))
        take(fold.add(now, rank, data))
        if not waiting[rank]:
            del waiting[rank]
            take(fold.end(rank))
        now += chance.choice([0.0, 0.001, 0.03])
        while not fold.is_empty and fold.deadline <= now:
            take(fold.expire(now))
        assert all(
            len(shown[each]) >= length for each, times in given.items() for at, length in times[-9:] if now >= at + HOLD
        )
    assert shown == sent
    assert fold.is_empty
