"""The launcher's own stdout and stderr: shared, slow, closed, and of every kind."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN, clean_environment
from tests.support.output import CONSOLE, ROOT, Jobs, Streams, finish, peak_memory, tee
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_file_is_continued_where_it_is(jobs: Jobs, tmp_path: Path) -> None:
    """Output redirected by the shell without append goes on at the shell's offset, as `(a; b) > file` needs it."""
    with (tmp_path / "out").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        jobs.run((tee(), "write(1, b'mine\\n')"), stdout=file)
        file.seek(0, os.SEEK_CUR)
        os.write(file.fileno(), b"after\n")
    assert (tmp_path / "out").read_bytes() == b"before\n[0]:mine\nafter\n"


def test_one_file_opened_twice(tmp_path: Path, worker: Callable[[str], Path]) -> None:
    """Under ``> log 2> log`` the file has what the workers of every attempt wrote, in its order."""
    program = worker("""
        for number in range(100):
            os.write(1 + number % 2, b"attempt %d, line %d\\n" % (attempt, number))
        os._exit(attempt == 0)
    """)
    log = tmp_path / "log"
    command = ["sh", "-c", f'exec "$@" > {log} 2> {log}', "sh", *ELASTIC_RUN, "--max-restarts=1", str(program)]
    subprocess.run(command, env=clean_environment(), cwd=ROOT, timeout=DEADLINE, check=True)
    wanted = [f"attempt {attempt}, line {number}" for attempt in range(2) for number in range(100)]
    assert [line for line in log.read_text().splitlines() if line.startswith("attempt")] == wanted


@pytest.mark.parametrize("streams", [tee(), CONSOLE], ids=["tee", "capture"])
def test_stuck_console(jobs: Jobs, streams: Streams) -> None:
    """While nobody reads the loop goes on, memory stays below 64 MB, the worker waits; then all arrives, in order."""
    code = "block = LETTER * 98 + LETTER.upper() + b'\\n'\nfor number in range(300): write(FD, block * 1000)"
    fd = 1 if streams is not CONSOLE else 2
    letters = b"abcd"
    workers = ((dict(streams), f"FD, LETTER = {fd}, {bytes([letter])!r}\n{code}") for letter in letters)
    job = jobs.start(*workers, say="end")
    wait_until(lambda: all(jobs.is_blocked_writing(rank) for rank in range(4)), what="all workers blocked")
    job.send_signal(signal.SIGUSR1)
    wait_until(lambda: jobs.has_note("usr1"), what="the loop lives")
    assert peak_memory(Path(f"/proc/{job.pid}/status")) < 64 << 20
    out, err = finish(job)
    got = (out if fd == 1 else err).replace(b"[0]:", b"").replace(b"elastic-run: end\n", b"")
    lines = [bytes([letter]) * 98 + bytes([letter]).upper() for letter in letters]
    for line in lines:
        own = got.translate(None, delete=bytes(set(range(256)) - set(line)))
        assert own == line * 300000
    assert (got.count(b"\n"), len(got)) == (1200000, 100 * 1200000)
    # A captured worker that pauses in the middle of a line for long makes room for the others there; a tee'd one never.
    assert fd != 1 or set(got.splitlines()) == set(lines)


def test_reader_of_stdout_goes_away(jobs: Jobs, tmp_path: Path) -> None:
    """After ``| head -1`` one line on stderr says so, the workers go on, and their files are complete."""
    code = "for number in range(50000): write(1, b'%d\\n' % number)"
    job = jobs.start((tee(tmp_path / "log"), code))
    assert job.stdout is not None
    assert job.stdout.readline() == b"[0]:0\n"
    job.stdout.close()
    job.stdout = None
    _, err = finish(job)
    assert re.fullmatch(rb"elastic-run: standard output has no reader any more: [^\n]*\n", err)
    assert (tmp_path / "log").read_bytes() == b"".join(b"%d\n" % number for number in range(50000))


def test_reader_of_stderr_goes_away(jobs: Jobs) -> None:
    """When nobody reads stderr the workers go on, and stdout has one line about it."""
    code = "for number in range(5000): write(2, b'%d\\n' % number)\nwrite(1, b'alive\\n')"
    job = jobs.start((CONSOLE, code))
    assert job.stderr is not None
    job.stderr.close()
    job.stderr = None
    out, _ = finish(job)
    assert b"elastic-run: standard error has no reader any more" in out
    assert b"alive\n" in out
    assert jobs.note("tail0").endswith(b"\n4999\n")


def test_a_console_without_a_reader_is_given_back() -> None:
    """A program that launches jobs again and again, and whose stderr nobody reads, keeps no descriptors."""
    program = """
import os
from elastic_run.loop import Loop
from elastic_run.multiprocessing.output.console import Console
before = len(os.listdir("/proc/self/fd"))
with Loop() as loop:
    console = Console(loop)
    console.say("nobody hears")
    loop.run_until(lambda: console.is_idle)
    console.close()
    console.close()
print(len(os.listdir("/proc/self/fd")) - before)
"""
    reading, writing = os.pipe()
    os.close(reading)
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writing, cwd=ROOT, check=True)
    os.close(writing)
    assert out.stdout.endswith(b"no reader any more: the job goes on without it\n0\n")


def test_the_shells_descriptor_stays_blocking(jobs: Jobs) -> None:
    """The mode of the descriptors that we share with the user's shell is not touched."""
    reading, writing = os.pipe()
    job = jobs.start((tee(), "write(1, b'x' * 500000)"), stdout=writing)
    wait_until(lambda: is_pipe_full(reading))
    assert os.get_blocking(writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as reader:
        assert len(reader.read()) == 500005
    finish(job)


def is_pipe_full(fd: int) -> bool:
    """Whether a pipe holds as much as its standard capacity, less a page."""
    waiting = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    return waiting > (1 << 16) - 4096


def test_stdout_is_a_socket(jobs: Jobs, tmp_path: Path) -> None:
    """A socket as stdout is written to without blocking, its mode untouched, and loses nothing."""
    ours, theirs = socket.socketpair()
    job = jobs.start(
        (tee(tmp_path / "log"), "for _ in range(30): write(1, b'x' * 99999 + b'\\n')"), stdout=theirs.fileno()
    )
    assert theirs.getblocking()
    theirs.close()
    with ours, ours.makefile("rb") as reader:
        assert reader.read() == (b"[0]:" + b"x" * 99999 + b"\n") * 30
    finish(job)


@pytest.mark.system  # for another owner of the pipe
def test_a_pipe_that_may_not_be_opened_again(jobs: Jobs) -> None:
    """Where the shared pipe can't be reopened (`su`, containers) the loop still never blocks, and nothing is lost."""
    reading, writing = os.pipe()
    os.fchown(writing, 65534, 65534)
    program = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    job = jobs.start((tee(), "write(1, (b'x' * 99 + b'\\n') * 30000)"), stdout=writing, program=program)
    os.close(writing)
    wait_until(jobs.is_blocked_writing)
    pipe = Path(f"/proc/self/fd/{reading}").readlink()
    own = [fd.name for fd in Path(f"/proc/{job.pid}/fd").iterdir() if fd.readlink() == pipe]
    flags = [Path(f"/proc/{job.pid}/fdinfo/{fd}").read_text(encoding="ascii").split()[3] for fd in own]
    assert {int(each, 8) & os.O_NONBLOCK for each in flags} == {0}
    job.send_signal(signal.SIGUSR1)
    wait_until(lambda: jobs.has_note("usr1"), what="the loop lives")
    with os.fdopen(reading, "rb") as reader:
        assert reader.read() == (b"[0]:" + b"x" * 99 + b"\n") * 30000
    finish(job)


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors(jobs: Jobs, closed: str, tmp_path: Path) -> None:
    """Started with standard descriptors closed, no file or pipe of ours takes their place, and the job runs."""
    program = ("sh", "-c", f'exec "$@" {closed}', "sh")
    code = "assert os.readlink('/proc/self/fd/0') == '/dev/null'; write(1, b'out\\n'); write(2, b'err\\n')"
    out, err = jobs.run((tee(tmp_path / "log"), code), program=program)
    assert out == (b"" if " >&-" in f" {closed}" else b"[0]:out\n")
    assert err == (b"" if "2>&-" in closed else b"err\n")
    assert (tmp_path / "log").read_bytes() == b"out\n"
