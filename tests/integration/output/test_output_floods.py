"""Output in bulk: floods, full disks, and files that several write."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import system
from tests.support.launch import ELASTIC_RUN, clean_environment
from tests.support.output import CONSOLE, Jobs, finish, tee
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker


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


# --- full disks -------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 256 KiB."""
    with system.small_disk(tmp_path, 256) as disk:
        yield disk


def test_full_disk_under_a_tee(jobs: Jobs, small_disk: Path) -> None:
    """A full disk is told once for all ranks; the console gets every line, and the file says what is missing."""
    (small_disk / "ballast").write_bytes(bytes(240000))
    code = f"""
for number in range(6000): write(1, b'%09d\\n' % number)
if RANK == 0:
    while not os.path.exists({str(small_disk / "gone")!r}): pass
    write(1, b'again\\n')
"""
    job = jobs.start(*((tee(small_disk / f"{rank}", rank), f"RANK = {rank}\n{code}") for rank in range(2)))
    assert job.stdout is not None
    got = b""
    while got.count(b"[0]:") < 6000:
        got += os.read(job.stdout.fileno(), 1 << 16)
    (small_disk / "ballast").unlink()
    (small_disk / "gone").touch()
    out, err = finish(job)
    own = [line for line in (got + out).splitlines() if line.startswith(b"[0]:")]
    assert own == [b"[0]:%09d" % number for number in range(6000)] + [b"[0]:again"]
    assert err.count(b"elastic-run: ") == 1
    assert err.startswith(f"elastic-run: the log file {small_disk}/".encode())
    assert f"({os.strerror(errno.ENOSPC)}): ".encode() in err
    assert b"the console gets all output, and the job goes on" in err
    text = (small_disk / "0").read_bytes()
    missing = re.search(rb"\nelastic-run: (\d+) bytes are missing here[^\n]*\nagain\n\Z", text)
    assert missing
    assert missing.start() + int(missing[1]) == 60000


def test_a_log_file_that_cannot_be_made(jobs: Jobs, tmp_path: Path) -> None:
    """Where a log file can't be opened its output goes to the console, and one line says why."""
    code = "write(1, b'out\\n'); write(2, b'err\\n')"
    streams = {"stdout": str(tmp_path / "no" / "out"), "stderr": str(tmp_path / "no" / "err")}
    out, err = jobs.run((streams, code), (tee(tmp_path / "no" / "tee", 1), code))
    assert sorted(out.splitlines()) == [b"[1]:out", b"out"]
    assert err.count(b"elastic-run: ") == 1
    assert err.count(b"err\n") == 2


@pytest.mark.parametrize("flag", ["--tee", "--redirects"])
def test_a_failure_beside_a_full_log_disk(flag: str, launch: Launch, worker: Worker, small_disk: Path) -> None:
    """Under a tee a full disk is no worker's trouble, so the report looks for another cause than under a redirect."""
    (small_disk / "ballast").write_bytes(bytes(200000))
    path = worker("print('x' * 200000, flush=True)\nsys.exit(3)")
    job = launch("--log-dir", small_disk, flag, "3", path)
    assert job.wait_exit() == (3 if flag == "--tee" else 1)
    assert job.stdout.count("x" * 200000) == (flag == "--tee")
    assert ("The disk of the log directory is full" in job.stderr) == (flag == "--redirects")
    assert (f"elastic-run: the log file {small_disk}/" in job.stderr) == (flag == "--tee")


# --- streams that are one file ----------------------------------------------------------------------------------------
#: Writes text and newline apart, as `print` does under `python -u`, and both streams at once.
#: The longest pause within a line goes into a file.
_TORN = """
import time
longest = 0.0
for number in range(300):
    for fd, name in ((1, "out"), (2, "err")):
        began_at = time.monotonic()  # at the end of `write` the reader may get the processor
        os.write(fd, f"{name} {rank} {number} {'x' * 80}".encode())
        os.write(fd, bytes([10]))
        longest = max(longest, time.monotonic() - began_at)
with open(os.path.join(sys.argv[1], str(rank)), "w") as file:
    file.write(str(longest))
"""
#: Seconds for which a worker may pause within a line: on a very busy machine it may get no processor for longer.
_PAUSE = 0.2
_WHOLE = re.compile(r"out \d \d+ x{80}")


def run_into(kind: str, command: list[str], path: Path) -> str:
    """Run a command with a file or a pipe as its stdout, and return what came there."""
    environment = clean_environment({})
    if kind == "pipe":
        job = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=True)
        return job.stdout.decode()
    with path.open("wb") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, env=environment, timeout=120, check=True)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_lines_of_workers_that_share_stdout_are_whole(kind: str, worker: Worker, tmp_path: Path) -> None:
    """Each line of each rank is there once, whichever of them writes at the same time."""
    command = [*ELASTIC_RUN, "--nproc-per-node=4", str(worker(_TORN)), str(tmp_path)]
    text = ""
    for _ in range(5):
        text = run_into(kind, command, tmp_path / "out")
        if all(float((tmp_path / str(rank)).read_text(encoding="ascii")) < _PAUSE for rank in range(4)):
            break
    lines = text.splitlines()
    assert [line for line in lines if not _WHOLE.fullmatch(line)] == []
    assert sorted(lines) == sorted(f"out {rank} {number} {'x' * 80}" for rank in range(4) for number in range(300))


def test_a_line_whose_worker_pauses_stays_whole(worker: Worker, tmp_path: Path) -> None:
    """A worker that gets no processor for 50 ms between text and newline still has its line for itself."""
    body = """
import time
for number in range(10):
    os.write(1, f"rank {rank}".encode())
    time.sleep(0.05)
    os.write(1, bytes([10]))
"""
    text = run_into("pipe", [*ELASTIC_RUN, "--nproc-per-node=2", str(worker(body))], tmp_path / "out")
    assert sorted(text.splitlines()) == ["rank 0"] * 10 + ["rank 1"] * 10


@pytest.mark.parametrize("flags", [("--nproc-per-node=1",), ("--nproc-per-node=2", "--no-capture")], ids=" ".join)
def test_one_worker_has_the_launchers_own_stdout(launch: Launch, worker: Worker, flags: tuple[str, ...]) -> None:
    """So do several with --no-capture."""
    job = launch(*flags, worker("say(os.readlink('/proc/self/fd/1') == os.readlink(f'/proc/{os.getppid()}/fd/1'))"))
    assert job.wait_exit() == 0
    assert set(job.stdout.split()) == {"True"}
