"""The console: pipes, files and terminals on which the workers' output is shown."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.output import CONSOLE, ROOT, Jobs, Streams, command, finish, is_write, peak_memory, tee
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.support.terminal import Terminal

    Start = Callable[..., subprocess.Popen[bytes]]


def test_a_file_is_continued_where_it_is(jobs: Jobs, tmp_path: Path) -> None:
    """Output redirected by the shell without append goes on at the shell's offset, as `(a; b) > file` needs it."""
    with (tmp_path / "out").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        jobs.run((tee(), "write(1, b'mine\\n')"), stdout=file)
        file.seek(0, os.SEEK_CUR)
        os.write(file.fileno(), b"after\n")
    assert (tmp_path / "out").read_bytes() == b"before\n[0]:mine\nafter\n"


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


# --- terminals --------------------------------------------------------------------------------------------------------
@pytest.fixture
def start(terminal: Terminal, tmp_path: Path) -> Start:
    """Start a job of `tests.support.output_job` in the terminal; each worker is its code, or streams and code."""

    def run(*workers: str | tuple[Streams, str], prepare: str = "", **spec: object) -> subprocess.Popen[bytes]:
        described = [(CONSOLE, worker) if isinstance(worker, str) else worker for worker in workers]
        shell = ("sh", "-c", f'cd {ROOT}; {prepare} exec "$@"', "sh")
        return terminal.start(*command(*described, notes=tmp_path, **spec), program=shell)

    return run


def test_workers_see_a_terminal_of_the_same_size(terminal: Terminal, start: Start) -> None:
    """In a worker stdout and stderr are terminals, as wide and high as the real one."""
    terminal.resize(33, 111)
    start("print([os.isatty(fd) for fd in (0, 1, 2)], os.get_terminal_size(1), tuple(os.get_terminal_size(2)))")
    terminal.wait_output(r"\[True, True, True\] os.terminal_size\(columns=111, lines=33\) \(111, 33\)\r\n")
    assert terminal.wait_exit() == 0


def test_resizing_reaches_the_workers(terminal: Terminal, start: Start, tmp_path: Path) -> None:
    """When the window changes its size the workers' terminals follow."""
    code = "print('ready')\nwhile os.get_terminal_size(2).columns != 77: pass\nprint('resized')"
    start(code, code)
    wait_until((tmp_path / "pid").exists)
    terminal.wait_output("ready(.|\n)*ready")
    terminal.resize(44, 77)
    terminal.wait_output("resized(.|\n)*resized")
    assert terminal.wait_exit() == 0


def test_bytes_pass_unchanged(terminal: Terminal, start: Start, tmp_path: Path) -> None:
    r"""Progress bars, colours and control characters come out as written; only the real terminal makes \r\n of \n."""
    text = b"\r 10%|#   |\r100%|####|\n\x1b[31mred\x1b[0m\ttab\x04\x03\x11\x13\x7f\xff\r\n"
    start(f"os.write(2, {text!r})")
    assert terminal.wait_exit() == 0
    assert bytes(terminal.output) == text.replace(b"\n", b"\r\n")
    assert (tmp_path / "tail0").read_bytes() == text


def test_nothing_is_lost_at_the_end(terminal: Terminal, start: Start) -> None:
    """A worker that writes much and ends at once has said it all, in the order of its two streams."""
    start("for number in range(20000): os.write(1 + number % 2, b'%d\\n' % number)")
    assert terminal.wait_exit() == 0
    assert bytes(terminal.output) == b"".join(b"%d\r\n" % number for number in range(20000))


def test_stdin_is_the_real_terminal(terminal: Terminal, start: Start) -> None:
    """A worker reads what is typed, as a debugger needs it."""
    start("print('got', repr(input('name? ')))")
    terminal.wait_output(r"name\? ")
    terminal.type("anna\n")
    terminal.wait_output("got 'anna'")
    assert terminal.wait_exit() == 0


def test_no_controlling_terminal_is_acquired(terminal: Terminal, start: Start) -> None:
    """A worker's own terminal is not its controlling one: no signal comes from it."""
    code = """
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print("none:", error.strerror)
"""
    start(code)
    terminal.wait_output("none: No such device or address")
    assert terminal.wait_exit() == 0


def test_capture_has_its_own_terminal(terminal: Terminal, start: Start) -> None:
    """With capture stdout and stderr are one terminal, which is not the launcher's."""
    start("print(os.ttyname(2) == os.ttyname(1), os.ttyname(2) == os.ttyname(0))")
    assert terminal.wait_exit() == 0
    assert bytes(terminal.output) == b"True False\r\n"


#: More than fits between a worker and a terminal that nobody reads.
MUCH = b"".join(b"%09d\n" % number for number in range(200000))
WRITE_MUCH = "for start in range(0, 200000, 100): write(2, b''.join(b'%09d\\n' % (start + at) for at in range(100)))"


def check_that_nobody_blocks(terminal: Terminal, notes: Path) -> None:
    """Wait until the worker blocks, see that the loop lives, then read it all."""
    wait_until((notes / "pid0").exists)
    worker = Path(f"/proc/{(notes / 'pid0').read_text(encoding='ascii')}/syscall")
    wait_until(lambda: is_write(worker.read_text(encoding="ascii")), what="the worker blocked")
    assert terminal.process is not None
    terminal.process.send_signal(signal.SIGUSR1)
    wait_until((notes / "usr1").exists, what="the loop lives")
    assert terminal.wait_exit() == 0
    assert bytes(terminal.output) == MUCH.replace(b"\n", b"\r\n")


def test_stopped_terminal(terminal: Terminal, start: Start, tmp_path: Path) -> None:
    """While nobody reads the terminal the launcher's loop goes on, and later everything comes."""
    start(WRITE_MUCH)
    check_that_nobody_blocks(terminal, tmp_path)


@pytest.mark.system  # for another owner of the terminal
def test_a_terminal_that_may_not_be_opened_again(terminal: Terminal, start: Start, tmp_path: Path) -> None:
    """Where the terminal belongs to another user the launcher still never blocks, and nothing is lost."""
    os.chown(os.ttyname(terminal.slave), 65534, 65534)
    Path(os.ttyname(terminal.slave)).chmod(0o600)
    start(WRITE_MUCH, prepare='set -- setpriv --bounding-set=-all --inh-caps=-all "$@";')
    check_that_nobody_blocks(terminal, tmp_path)


def test_first_byte_is_quick(terminal: Terminal, start: Start) -> None:
    """From a worker's write to the terminal it takes milliseconds (the median of 20; 10 ms is the promise)."""
    start("import time\nfor _ in range(20):\n    input()\n    os.write(2, b'at %d\\n' % time.monotonic_ns())")
    delays = []
    for _ in range(20):
        del terminal.output[:]
        terminal.type("\n")
        found = terminal.wait_output(r"at (\d+)\r\n")
        delays.append(time.monotonic_ns() - int(found[1]))
    assert sorted(delays)[10] < stretched(10_000_000)
    assert terminal.wait_exit() == 0


def test_hang_up(start: Start, terminal: Terminal, tmp_path: Path) -> None:
    """When the terminal goes away (and nobody stops the job) the workers go on to their end."""
    go = tmp_path / "go"
    os.mkfifo(go)
    code = f"""
print('ready')
open({str(go)!r}).read()
for number in range(9999): print(number, file=sys.stderr)
open({str(tmp_path / "done")!r}, "w")
"""
    start(code, prepare="trap '' HUP;")
    terminal.wait_output("ready")
    process = terminal.process
    assert process is not None
    os.close(terminal.slave)
    os.close(terminal.master)
    terminal.master, terminal.slave = os.openpty()
    with go.open("w"):
        pass
    assert process.wait(60) == 0
    assert (tmp_path / "done").exists()
    assert (tmp_path / "tail0").read_bytes().endswith(b"9998\n")
