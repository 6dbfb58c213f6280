"""A worker that floods its stderr loses nothing, whatever the launcher's stderr is."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.isolation import small_disk
from tests.support.output import CONSOLE, Jobs, finish
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pathlib import Path

_PIPE = 1 << 20
_DATA = b"".join([b"%d\n" % number for number in range(200_000)])[:_PIPE]


class Flood:
    """A worker that fills its stderr's pipe while the launcher is stopped, and waits at its end.

    Args:
        jobs: Starts it.
        directory: A place for its FIFOs, and for its output.
        stderr: The launcher's.
    """

    def __init__(self, jobs: Jobs, directory: Path, stderr: int) -> None:
        self._begin, self._filled, self._end = (directory / name for name in ("begin", "filled", "end"))
        for path in (self._begin, self._filled, self._end):
            os.mkfifo(path)
        data = directory / "data"
        data.write_bytes(_DATA)
        code = f"""
data = open({str(data)!r}, 'rb').read()
open({str(self._begin)!r}).close()
write(2, data)
open({str(self._filled)!r}, 'w').close()
open({str(self._end)!r}).close()
"""
        self.job = jobs.start((CONSOLE, code), stderr=stderr)
        wait_until(lambda: jobs.has_note("pid"))
        self.job.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.job.pid, os.WSTOPPED)
        self._begin.write_bytes(b"")
        self._filled.read_bytes()
        self.job.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Let the worker end."""
        self._end.write_bytes(b"")
        finish(self.job)


def test_a_flood_to_a_pipe(jobs: Jobs, tmp_path: Path) -> None:
    """All that waits in a worker's pipe goes to the console's pipe, and its end is kept."""
    reading, writing = os.pipe()
    flood = Flood(jobs, tmp_path, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as reader:
        assert reader.read(len(_DATA)) == _DATA
        flood.finish()
        assert reader.read() == b""
    assert jobs.note("tail0") == _DATA[-65536:]


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_flood_to_a_file_is_written(jobs: Jobs, tmp_path: Path, mode: str) -> None:
    """To a file it is written, at its offset or to its end."""
    path = tmp_path / "out"
    with path.open(mode) as file:
        file.write(b"before\n")
        file.flush()
        flood = Flood(jobs, tmp_path, file.fileno())
        wait_until(lambda: path.stat().st_size >= len(_DATA) + 7)
        flood.finish()
    assert path.read_bytes() == b"before\n" + _DATA
    assert jobs.note("tail0") == _DATA[-65536:]


def test_floods_of_two_launchers_to_one_open_file(tmp_path: Path) -> None:
    """Two launchers that a shell has given one open file don't write over each other."""
    count = 400
    path = tmp_path / "out"
    with path.open("wb") as file, Jobs(tmp_path / "one") as one, Jobs(tmp_path / "other") as other:
        for jobs, letter in ((one, "a"), (other, "b")):
            jobs.start((CONSOLE, f"for _ in range({count}): write(2, b'{letter}' * 65536)"), stderr=file)
        wait_until(lambda: one.has_note("status") and other.has_note("status"), deadline=60.0)
    out = path.read_bytes()
    assert (out.count(b"a"), out.count(b"b")) == (count << 16, count << 16)


def test_a_full_disk_in_a_flood(jobs: Jobs, tmp_path: Path) -> None:
    """When the disk is full in the middle of a flood that is told once, and what fits is there."""
    with small_disk(tmp_path, 512) as disk:
        with (disk / "out").open("wb") as file:
            flood = Flood(jobs, tmp_path, file.fileno())
            assert flood.job.stdout is not None
            told = flood.job.stdout.readline()
            flood.finish()
        assert told.startswith(b"elastic-run: standard error: " + os.strerror(28).encode())
        assert (disk / "out").read_bytes() == _DATA[: 512 << 10]


def test_floods_of_two_ranks_beside_the_launchers_word(jobs: Jobs) -> None:
    """Two flooding ranks, read slowly, lose nothing and keep their order, and the launcher speaks last."""
    numbers = b"".join([b"%d\n" % number for number in range(1 << 19)])
    letters = bytes.maketrans(b"0123456789", b"abcdfghkmo")  # none of them in the launcher's line
    code = "text = b''.join([b'%d\\n' % number for number in range(1 << 19)])\nwrite(2, text"
    workers = [(CONSOLE, f"{code})"), (CONSOLE, f"{code}.translate({letters!r}))")]
    job = jobs.start(*workers, say="END")
    wait_until(lambda: all(jobs.is_blocked_writing(rank) for rank in range(2)), what="both workers blocked")
    _, err = finish(job)
    said = b"\nelastic-run: END\n"
    assert err.endswith(said)
    # One that pauses in the middle of a line for long makes room for the other there.
    text = err.removesuffix(said[1:])
    assert text.count(b"\n") == 2 * (1 << 19)
    for own in (numbers, numbers.translate(letters)):
        others = bytes(set(range(256)) - set(own) | {10})
        assert (text.translate(None, others) == own.replace(b"\n", b"")) is True


def test_the_reader_goes_away_in_a_flood(jobs: Jobs) -> None:
    """When the reader leaves in the middle of a flood the job goes on, and stdout has one line about it."""
    reading, writing = os.pipe()
    code = "for _ in range(1000): write(2, (b'x' * 63 + b'\\n') * 1024)"
    job = jobs.start((CONSOLE, code), stderr=writing)
    os.close(writing)
    wait_until(jobs.is_blocked_writing)
    for _ in range(100):  # so that it is in full swing
        assert os.read(reading, 1 << 16)
    os.close(reading)
    out, _ = finish(job)
    assert out.startswith(b"elastic-run: standard error has no reader any more")
    assert out.count(b"\n") == 1
    assert jobs.note("tail0") == (b"x" * 63 + b"\n") * 1024
