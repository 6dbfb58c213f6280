"""What workers write when the launcher's stderr is a terminal: through a raw pseudo-terminal of each worker's own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.output import CONSOLE, ROOT, Streams, command, is_write
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.support.terminal import Terminal

    Start = Callable[..., subprocess.Popen[bytes]]


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


#: A launcher whose window is resized when its workers run, and it doesn't hear of it yet.
_RESIZED_EARLY = """
import fcntl, runpy, struct, sys, termios
from elastic_run.agent.driver.signal_watch import SignalWatch
begin = SignalWatch.begin
def begin_late(self):
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 77, 0, 0))
    begin(self)
SignalWatch.begin = begin_late
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


def test_resizing_while_the_launcher_starts_reaches_the_workers(
    terminal: Terminal, worker: Callable[[str], Path]
) -> None:
    """A window that changes its size after the first workers started, and before the launcher listens, is followed."""
    program = worker("""
        while os.get_terminal_size(2).columns != 77: pass
        print("resized")
    """)
    terminal.start("--nproc-per-node=1", program, program=(sys.executable, "-c", _RESIZED_EARLY))
    terminal.wait_output("resized\r\n")
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


def test_no_capture(terminal: Terminal, start: Start) -> None:
    """Without capture workers have the launcher's terminal itself."""
    start("print(os.ttyname(2) == os.ttyname(0))", capture=False)
    assert terminal.wait_exit() == 0
    assert bytes(terminal.output) == b"True\r\n"


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
