"""A worker that floods its stderr loses nothing, whatever the launcher's stderr is."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

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
