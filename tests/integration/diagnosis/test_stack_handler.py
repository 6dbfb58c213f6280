"""The handler for stacks inside a program: what it must not change there, whatever the program does."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from elastic_run.diagnosis.stack_requests import StackRequests
from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import StackPipe, stack_variables
from elastic_run.signals import MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, STACK_SIGNAL
from tests.support.processes import TEST_TOKEN
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_run.core.failure.stacks import Dump

_NUMBER = 900
_SIGNALS = [PYTHON_STACK_SIGNAL, MAIN_STACK_SIGNAL, STACK_SIGNAL]
#: The .pth file has registered the handlers by now; or `register` does, as in a fork.
_REGISTERS = f"from elastic_run.worker_start import register; register({_NUMBER}, {STACK_SIGNAL})\n"
_HEAD = f"""
import ctypes, gc, os, signal, sys, threading, time, weakref
PYTHON, MAIN, ALL = {_SIGNALS}
libc = ctypes.CDLL(None)
def wait(): os.read(0, 1)
"""


class _Program(NamedTuple):
    """A program that has the handlers, and the agent's end of its pipe."""

    process: subprocess.Popen[str]
    pipe: StackPipe

    def read_line(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Let it return from `wait`."""
        assert self.process.stdin is not None
        self.process.stdin.write(".")
        self.process.stdin.flush()

    def ask(self, *, wait_limit: float = 3.0) -> Dump:
        """Return its stacks, as the agent gets them."""
        with Loop() as loop:
            found: list[Dump] = []
            requests = StackRequests(loop, {0: StackPipe(os.dup(self.pipe.reading), _NUMBER)})
            requests.ask({0: self.process.pid}, wait_limit, lambda dumps: found.append(dumps[0]))
            loop.run_until(lambda: bool(found))
            requests.close()
        return found[0]


@contextmanager
def _start(body: str, *, by_pth: bool = True) -> Iterator[_Program]:
    """Start a program with the handlers; it ends with its block."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.dup2(writing, _NUMBER)
    os.close(writing)
    env = {**os.environ, **(stack_variables(_NUMBER) if by_pth else {}), "RANK": "0", "ELASTIC_RUN_TITLE": "0"}
    code = ("" if by_pth else _REGISTERS) + _HEAD + body
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            env=env,
            pass_fds=(_NUMBER,),
            start_new_session=True,
            text=True,
            **streams,  # type: ignore[call-overload]  # two numbers
        )
    finally:
        os.close(_NUMBER)
    with process:
        try:
            yield _Program(process, StackPipe(reading, _NUMBER))
        finally:
            process.kill()
            os.close(reading)


_ways = pytest.mark.parametrize("by_pth", [True, False], ids=["executed", "forked"])

_FULL_PIPE = f"""
os.set_blocking({_NUMBER}, False)
try:
    while os.write({_NUMBER}, bytes(4096)): pass
except BlockingIOError:
    os.set_blocking({_NUMBER}, True)
class Late(Exception): pass
def raise_late(*_): raise Late
signal.signal(signal.SIGALRM, raise_late)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.raise_signal(PYTHON)
    time.sleep(30)
    print("lost")
except Late:
    print("late")
"""


@_ways
def test_an_exception_of_another_handler_is_not_lost(by_pth: bool) -> None:
    """A timeout by SIGALRM that comes while the stacks are written reaches the program."""
    with _start(_FULL_PIPE, by_pth=by_pth) as program:
        assert program.read_line() == "late"


_OTHER_FILE = f"""
other = os.open(os.environ["OTHER"], os.O_RDWR | os.O_CREAT)
os.dup2(other, {_NUMBER})
signal.raise_signal(PYTHON)
print("done")
"""


@_ways
def test_nothing_is_written_into_a_file_of_the_program(
    by_pth: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that has closed all descriptors, and has a file under the same number, keeps its content."""
    monkeypatch.setenv("OTHER", str(tmp_path / "other"))
    with _start(_OTHER_FILE, by_pth=by_pth) as program:
        assert program.read_line() == "done"
    assert (tmp_path / "other").read_bytes() == b""


_KEEPS = """
gc.disable()
class Batch: pass
def step():
    batch = Batch()
    threading.Thread(target=wait, daemon=True).start()
    signal.raise_signal(PYTHON)
    return weakref.ref(batch)
print("kept" if step()() else "freed")
"""


@_ways
def test_no_frame_of_the_program_is_kept(by_pth: bool) -> None:
    """What the interrupted functions hold, such as memory of a GPU, goes when they return; no garbage is collected."""
    with _start(_KEEPS, by_pth=by_pth) as program:
        assert program.read_line() == "freed"


_COMPILER = f"""
from torch._dynamo import trace_rules
executed = signal.getsignal(PYTHON)
{_REGISTERS}
forked = signal.getsignal(PYTHON)
print(executed is forked, *(trace_rules.check(handler.__code__) for handler in (executed, forked)))
"""


@pytest.mark.long
def test_torch_does_not_compile_the_handler() -> None:
    """A signal may come in a function that torch.compile runs: torch passes over the handler there."""
    with _start(_COMPILER) as program:
        assert program.read_line() == "False True True"


_BLOCKS = """
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print("ready")
wait()
print(sorted(signal.sigpending()))
"""


def test_a_signal_that_is_blocked_is_not_sent() -> None:
    """It would come when the program has executed another one, and end that, or be taken by `signal.sigwait`."""
    with _start(_BLOCKS) as program:
        assert program.read_line() == "ready"
        assert program.ask(wait_limit=0.3).problem == f"blocks signal {STACK_SIGNAL}"
        program.go_on()
        assert program.read_line() == "[]"


_PATCHED = """
import _thread
_thread.get_ident = lambda: 7
threading.Thread(target=wait, daemon=True).start()
def step():
    print("ready")
    while True: signal.pause()
step()
"""


def test_a_program_that_replaces_threads_has_stacks() -> None:
    """As gevent, whose functions tell other numbers of threads; the main thread comes last."""
    with _start(_PATCHED) as program:
        assert program.read_line() == "ready"
        *_, last = program.ask().text.split("Thread ")
        assert "in step\n" in last
        assert "elastic_run" not in last


_JOINS = """
def add(number):
    return number + 1
def run():
    while True:
        sorted(range(10), key=add)
def join():
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    print("ready")
    thread.join()
join()
"""


def _calls(program: _Program) -> set[str]:
    """Return the ends of the lines of a program's stacks."""
    return {f"in {line.rpartition(' in ')[2]}" for line in program.ask().text.splitlines()}


@_ways
def test_a_main_thread_that_waits_for_a_running_one_shows_both(by_pth: bool) -> None:
    """The wait for the lock goes on afterwards."""
    with _start(_JOINS, by_pth=by_pth) as program:
        assert program.read_line() == "ready"
        wait_until(lambda: {"in run", "in join"} <= _calls(program), what="the stacks of both")
        assert program.process.poll() is None


_WAITS_IN_C = """
def run():
    while True:
        pass
threading.Thread(target=run, daemon=True).start()
print("ready")
print(libc.read(0, ctypes.create_string_buffer(1), 1))
"""


def test_a_system_call_of_c_goes_on() -> None:
    """C code that expects no signal does not see one, though the handler in Python was asked for first."""
    with _start(_WAITS_IN_C) as program:
        assert program.read_line() == "ready"
        wait_until(lambda: program.ask().text.startswith("Stack "), what="the wait in C")
        program.go_on()
        assert program.read_line() == "1"


def test_a_worker_imports_two_modules_of_ours_at_its_start() -> None:
    """No other file is read before the program, with the rank in the title and without: each worker waits for it."""
    reading, writing = os.pipe()

    def modules(more: dict[str, str]) -> set[str]:
        code = "import sys; print(*sys.modules)"
        env = {**os.environ, "RANK": "0"} | more
        env.pop(TEST_TOKEN)  # with this variable, elastic-run-tests.pth imports atexit
        command = [sys.executable, "-c", code]
        done = subprocess.check_output(command, env=env, pass_fds=(writing,), start_new_session=True, text=True)
        return {*done.split()}

    try:
        added = modules(stack_variables(writing)) - modules({})
    finally:
        os.close(reading)
        os.close(writing)
    assert added == {"elastic_run", "elastic_run.worker_start", "atexit", "faulthandler"}
