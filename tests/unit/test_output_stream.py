"""Taking turns on a stream of the console."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.console import QUEUE_LIMIT, Source
from elastic_run.multiprocessing.output.sink import LogFile
from tests.support.stream_bench import Bench

if TYPE_CHECKING:
    from elastic_run.multiprocessing.output.worker_lines import Channel


@pytest.fixture
def bench() -> Bench:
    """Give a stream with a reader that takes everything."""
    return Bench()


def give(source: Source, *pieces: bytes) -> None:
    """Let a source write."""
    for piece in pieces:
        source.add(piece)


def test_two_writes_make_one_line(bench: Bench) -> None:
    """A line written in two pieces stays whole when another rank writes between them."""
    one, other = bench.captured(), bench.captured()
    give(one, b"text")
    give(other, b"other\n")
    assert bench.got == b"text"
    give(one, b"\n")
    bench.loop.turn()
    assert bench.got == b"text\nother\n"


def test_the_wait_ends(bench: Bench) -> None:
    """A rank that stays silent within its line holds the others up for milliseconds only; no byte is added."""
    bar, other = bench.captured(), bench.captured()
    give(bar, b"\r 10%")
    give(other, b"other\n")
    bench.loop.advance(0.004)
    assert bench.got == b"\r 10%"
    bench.loop.advance(0.002)
    assert bench.got == b"\r 10%other\n"
    give(bar, b"\r 20%")
    assert bench.got.endswith(b"\r 20%")
    bench.loop.advance(1.0)
    give(other, b"at once\n")
    assert bench.got.endswith(b"at once\n")


def test_lines_stay_whole_where_nobody_watches(bench: Bench) -> None:
    """In a file or a pipe the others wait for a quarter of a second, also where the line grows all the time."""
    slow, other = bench.captured(is_terminal=False), bench.captured()
    give(slow, b"text")
    give(other, b"other\n")
    bench.loop.advance(0.2)
    assert bench.got == b"text"
    give(slow, b"\n")
    bench.loop.turn()
    assert bench.got == b"text\nother\n"
    give(slow, b".")
    give(other, b"next\n")
    bench.loop.advance(0.2)
    give(slow, b".")
    assert bench.got == b"text\nother\n.."
    bench.loop.advance(0.06)
    assert bench.got == b"text\nother\n..next\n"


def test_a_backlog_goes_with_the_console(bench: Bench, tmp_path: Path) -> None:
    """A console that is given back while a tee is behind, after a stop signal, leaves no descriptor of the log file."""
    log = LogFile(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), lambda _: None)
    behind = bench.teed(b"", file=log)
    bench.reader.room = 0
    for _ in range(2):
        log.write(b"x" * QUEUE_LIMIT + b"\n")
        give(behind, b"x" * QUEUE_LIMIT + b"\n")
    behind.end()
    name = str(tmp_path / "log")
    assert name in open_files()
    bench.stream.close()
    assert name not in open_files()


def test_a_line_that_came_behind_is_shown(bench: Bench, tmp_path: Path) -> None:
    """A tee'd line that the console could not take at once is shown, though its worker writes nothing more."""
    log = LogFile(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), lambda _: None)
    one, behind = bench.captured(), bench.teed(b"[1]:", file=log)
    give(one, b"text")
    log.write(b"line\n")
    give(behind, b"line\n")
    give(one, b"\n")
    bench.loop.turn()
    assert bench.got == b"text\n[1]:line\n"
    behind.end()


def open_files() -> list[str]:
    """Return the paths of this process's open files."""
    return [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]


def test_a_long_line_is_one_piece(bench: Bench) -> None:
    """A line over the limit comes in parts under one prefix, and others wait for its end."""
    long, other = bench.teed(b"[0]:"), bench.teed(b"[1]:")
    give(long, b"x" * 60, b"x" * 60)
    give(other, b"other\n")
    give(long, b"y" * 10, b"y" * 200, b"z\nnext\n")
    bench.loop.turn()
    assert bench.got == b"[0]:" + b"x" * 120 + b"y" * 210 + b"z\n[0]:next\n[1]:other\n"


def test_a_prompt_is_shown(bench: Bench) -> None:
    """An unfinished line is shown after 100 ms of its worker's silence; what follows stands on the same line."""
    one = bench.teed(b"[0]:")
    give(one, b"line\n(Pd")
    bench.loop.advance(0.06)
    give(one, b"b) ")
    bench.loop.advance(0.06)
    assert bench.got == b"[0]:line\n"
    bench.loop.advance(0.05)
    assert bench.got == b"[0]:line\n[0]:(Pdb) "
    give(one, b"x = 1\n(Pdb) ")
    bench.loop.advance(0.1)
    assert bench.got == b"[0]:line\n[0]:(Pdb) x = 1\n[0]:(Pdb) "
    one.end()
    assert bench.got.endswith(b"(Pdb) \n")


def test_a_slow_line_stays_whole(bench: Bench) -> None:
    """Others wait for a second for the rest of a line that is shown in part, and not again at its next pause."""
    one, other = bench.teed(b"[0]:"), bench.teed(b"[1]:")
    give(one, b"saving ...")
    bench.loop.advance(0.1)
    give(other, b"other\n")
    bench.loop.advance(0.8)
    give(one, b" done\n")
    bench.loop.turn()
    assert bench.got == b"[0]:saving ... done\n[1]:other\n"
    for _ in range(3):
        give(one, b".")
        bench.loop.advance(0.6)
    give(other, b"at once\n")
    assert bench.got.endswith(b"[0]:...\n[1]:at once\n")
    give(one, b"\nnext\n")
    assert bench.got.endswith(b"[1]:at once\n[0]:next\n")


def test_a_line_without_end_gives_way(bench: Bench) -> None:
    """A line that goes on and on is broken at last for those who wait; not a byte of it is lost."""
    long, other = bench.teed(b"[0]:"), bench.teed(b"[1]:")
    long.hold_limit = 1000
    give(long, b"x" * 200)
    give(other, b"other\n")
    for _ in range(20):
        give(long, b"x" * 100)
        bench.loop.turn()
    give(long, b"\n")
    assert [line.replace(b"x", b"") for line in bench.got.splitlines()] == [b"[0]:", b"[1]:other", b"[0]:"]
    assert bench.got.count(b"x") == 2200


@pytest.mark.parametrize("size", [1, 100, 5000, 70000])
def test_backpressure(bench: Bench, size: int) -> None:
    """Nobody may write above the limit, everyone goes on once the queue is low, and the order is kept."""
    reading, writing = os.pipe()
    os.write(writing, b"more\n")
    source = bench.captured(reading=reading)
    bench.reader.room = 0
    sent = bytearray()
    while source.is_clear:
        piece = b"%d\n" % len(sent) + b"x" * size
        give(source, piece)
        sent += piece
    assert bench.stream.is_full
    assert len(sent) < QUEUE_LIMIT + size + 10
    bench.loop.readers[reading]()
    assert reading not in bench.loop.readers
    bench.reader.room = len(sent) // 4
    bench.loop.drain()
    assert reading not in bench.loop.readers
    os.close(writing)
    bench.reader.room = 1 << 30
    bench.loop.drain()
    assert bench.got == sent + b"more\n"
    assert bench.stream.is_idle


def test_the_dead_speak_first(bench: Bench) -> None:
    """What an ended worker has left to say comes before anything that somebody says later."""
    reading, writing = os.pipe()
    worker, living = bench.captured(), bench.captured(reading=reading)
    bench.reader.room = 0
    give(living, b"x" * (QUEUE_LIMIT + 1))
    os.write(writing, b"living\n")
    os.close(writing)
    bench.loop.readers[reading]()
    give(worker, b"last ", b"words\n")
    worker.end()
    give(Source(bench.stream), b"report\n")
    bench.reader.room = 1 << 30
    bench.loop.drain()
    said = bench.got.lstrip(b"x")
    assert said.index(b"last words\n") < said.index(b"report\n")
    assert sorted(said.split(b"\n")) == sorted([b"", b"living", b"last words", b"report"])
    assert bench.stream.is_idle


def test_progress_is_shown_once_a_second(bench: Bench) -> None:
    """An unfinished line with carriage returns is shown up to the last one, each update after the prefix."""
    bar = bench.teed(b"[0]:", limit=1 << 20)
    give(bar, b" 10%\r", b" 20%\r 3")
    assert bench.got == b""
    bench.loop.advance(1.0)
    assert bench.got == b"[0]: 10%\r[0]: 20%\r\n"
    give(bar, b"0%\r")
    bench.loop.advance(1.0)
    give(bar, b"done\n")
    assert bench.got == b"[0]: 10%\r[0]: 20%\r\n[0]: 30%\r\n[0]:done\n"


class Logged(LogFile):
    """A log file that cannot be written for a while, again and again."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), lambda _: None)
        self._chance = chance

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append data, or count it as lost."""
        if self._chance.random() < 0.1:
            self.lost += len(data)
            return len(data)
        return super().write(data)


@pytest.mark.parametrize("seed", range(40))
def test_any_interleaving(bench: Bench, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes when, however slow the reader: every tee'd line is whole, each byte comes once and in order."""
    monkeypatch.setattr("elastic_run.multiprocessing.output.worker_lines._SILENCE", 60.0)  # nobody is silent so long
    chance = random.Random(seed)  # noqa: S311 - not a secret
    tees = {name: bench.teed(b"[%s]:" % name, limit=50) for name in (b"A", b"B", b"C")}
    logs = {name: Logged(tmp_path / "log", chance) for name in (b"D", b"E", b"F")}
    tees |= {name: bench.teed(b"[%s]:" % name, limit=50, file=log) for name, log in logs.items()}
    passers = {name: bench.captured() for name in (b"x", b"y")}
    sources: dict[bytes, Channel] = {**tees, **passers}
    sent = dict.fromkeys(sources, b"")
    bench.reader.room = 0
    for _ in range(400):
        name = chance.choice(list(sources))
        numbers = [b"%s%d" % (name, chance.randrange(10)) * chance.choice([0, 1, 40]) for _ in range(3)]
        piece = chance.choice([b"", b"\n"]).join(numbers) + chance.choice([b"", b"\n"])
        if piece and (sources[name].is_ready or chance.random() < 0.2):
            if name in logs:
                logs[name].write(piece)
            give(sources[name], piece)
            sent[name] += piece
        bench.reader.room = chance.choice([0, 7, 300])
        bench.loop.drain()
        bench.loop.advance(chance.choice([0.0, 0.003]))
    for name in chance.sample(list(sources), len(sources)):
        sources[name].end()
    bench.reader.room = 1 << 30
    bench.loop.drain()
    bench.loop.advance(1.0)
    assert bench.stream.is_idle
    lines = bench.got.split(b"\n")
    for name in tees:
        own = [line[4:] for line in lines if line.startswith(b"[%s]:" % name)]
        assert own == (sent[name] if sent[name].endswith(b"\n") else sent[name] + b"\n").split(b"\n")[:-1]
    for name in passers:
        assert re.findall(rb"%s\d" % name, bench.got) == re.findall(rb"%s\d" % name, sent[name])
