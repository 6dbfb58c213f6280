"""`elastic_run.spawn`, and what a program is told of its workers' failures and interrupts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import Launched
from tests.support.processes import wait_gone
from tests.support.programs import all_methods, write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Launched]


# --- spawn, in the manner of torch.multiprocessing.spawn --------------------------------------------------------------
_HEAD = """
import os, signal, subprocess, sys, time
import elastic_run
from elastic_run.multiprocessing.functions.spawn import ProcessExitedException, ProcessRaisedException

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def spawn(function, *args, nprocs=2, **options):
    return elastic_run.spawn(function, args, nprocs, start_method=sys.argv[1], **options)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a program made of its functions and what it does as the main program."""
    started: list[Launched] = []

    def start(functions: str, main: str, method: str = "spawn") -> Launched:
        path = write_program(tmp_path / "program.py", _HEAD, functions, main)
        started.append(Launched((sys.executable, path, method), env=dict(os.environ), stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for each in started:
        each.close()


@all_methods
def test_each_process_gets_its_index(method: str, run: Run) -> None:
    """The function runs with its index in front of the arguments; stdout is the program's own."""
    job = run("def work(index, text): say(index, text)", "assert spawn(work, 'hello') is None", method)
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["0 hello", "1 hello"]


@all_methods
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("raise KeyError('here')", "ProcessRaisedException 1 None"),
        ("sys.exit(4)", "ProcessExitedException 1 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ProcessExitedException 1 -9"),
    ],
)
def test_a_failure_raises_and_stops_the_others(method: str, failure: str, expected: str, run: Run) -> None:
    """The first failure is raised with its index and pid, and the other process and its children are gone then."""
    job = run(
        f"""
        def work(index):
            if index == 0:
                say("child", subprocess.Popen(["sleep", "1000"]).pid)
                open(__file__ + ".gate", "w").close()
                time.sleep(1000)
            open(__file__ + ".gate").close()  # opens when the other has said its line
            {failure}
        """,
        """
        os.mkfifo(__file__ + ".gate")
        try:
            spawn(work)
        except (ProcessRaisedException, ProcessExitedException) as error:
            say(type(error).__name__, error.error_index, getattr(error, "exit_code", None))
            is_told = "in work" in str(error) and "KeyError: 'here'" in str(error)
            assert is_told == (type(error) is ProcessRaisedException)
        """,
        method,
    )
    assert job.wait_exit() == 0, job.stderr
    child, said = sorted(job.stdout.splitlines(), key=lambda line: not line.startswith("child"))
    assert said == expected
    wait_gone(int(child.split()[1]), deadline=2.0)
    assert not job.stderr


def test_join_tells_whether_all_have_ended(run: Run) -> None:
    """Without joining the program goes on; `join` waits at most its timeout, and is true when all have ended."""
    job = run(
        "def work(index): sys.stdin.close(); say('ready'); time.sleep(1000)",
        """
        context = spawn(work, join=False)
        assert not context.join(timeout=0.01)
        assert all(process.is_alive() and process.pid in context.pids() for process in context.processes)
        for process in context.processes: process.kill()
        try:
            while not context.join(): pass
        except ProcessExitedException as error:
            say(error.exit_code, error.signal_name)
        assert [process.exitcode for process in context.processes] == [-9, -9]
        """,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "-9 SIGKILL"


@pytest.mark.parametrize(("options", "seconds", "said"), [("", 0.2, ["0", "1"]), (", daemon=True", 1000, [])])
def test_the_end_of_the_program(options: str, seconds: float, said: list[str], run: Run) -> None:
    """A program waits at its end for processes that it didn't join, unless they are daemons: those end with it."""
    job = run(
        f"def work(index): time.sleep({seconds}); say(index)",
        f"spawn(work, join=False{options})",
    )
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == said


def test_interrupt(run: Run) -> None:
    """Ctrl-C in the waiting program reaches the processes, which are gone when KeyboardInterrupt is raised."""
    job = run(
        "def work(index): say('ready', os.getpid()); time.sleep(1000)",
        """
        try:
            spawn(work)
        except KeyboardInterrupt:
            say("interrupted")
        """,
    )
    pids = [int(match[1]) for match in job.wait_lines(r"ready (\d+)", count=2)]
    job.send(signal.SIGINT)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "interrupted"
    for pid in pids:
        wait_gone(pid, deadline=0.1)


# --- failures, interrupts and bad moments of programs that launch -----------------------------------------------------
_LAUNCHES = """
import os, signal, sys, time
from elastic_run import ChildFailedError, LaunchConfig, elastic_launch

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def fail(entrypoint, *args, count=1):
    config = LaunchConfig(1, 1, count, rdzv_backend="local", max_restarts=0, start_method=sys.argv[1])
    try:
        elastic_launch(config, entrypoint)(*args)
    except ChildFailedError as error:
        return error
"""


@pytest.fixture
def run_launch(tmp_path: Path) -> Iterator[Run]:
    """Run a program made of its functions and what it does as the main program."""
    started: list[Launched] = []

    def start(functions: str, main: str, method: str = "spawn") -> Launched:
        path = write_program(tmp_path / "host.py", _LAUNCHES, functions, main)
        started.append(Launched((sys.executable, path, method), env=dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.close()


@all_methods
def test_a_traceback_begins_in_the_function(method: str, run_launch: Run) -> None:
    """What is recorded of an exception has the user's frames, and none of how the function was called."""
    job = run_launch(
        "def work(): raise ValueError('no such thing')",
        """
        _, failure = fail(work).get_first_failure()
        say(failure.message["extraInfo"]["py_callstack"])
        """,
        method,
    )
    assert job.wait_exit() == 0, job.stderr
    frames = re.findall(r'File ".*?([^/"]+)", line \d+, in (\w+)', job.stdout)
    assert frames == [("host.py", "work")], job.stdout


@pytest.mark.parametrize(
    ("program", "message", "callstack"),
    [
        (
            "def step():\\n    raise ValueError('no such thing')\\nstep()",
            "ValueError: no such thing",
            "Traceback (most recent call last):",
        ),
        ("import sys; sys.exit('no data: give --data')", "exit code 1; its stderr ends with: no data: give --data", ""),
        ("import os; os._exit(3)", "exit code 3; what it said stands on its stderr", ""),
        ("import os; os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL) received by PID", ""),
    ],
    ids=["exception", "sentence", "silent", "signal"],
)
def test_a_command_that_recorded_nothing(program: str, message: str, callstack: str, run_launch: Run) -> None:
    """The failure of a command without `@record` has what its stderr said, in the form of a recorded exception."""
    job = run_launch(
        "",
        f"""
        _, failure = fail(sys.executable, "-c", "{program}").get_first_failure()
        said = failure.message
        say(said["message"] if isinstance(said, dict) else said)
        say(said["extraInfo"]["py_callstack"] if isinstance(said, dict) else "")
        """,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.startswith(message)
    assert callstack in job.stdout


@all_methods
def test_the_first_failure_is_the_root_cause(method: str, run_launch: Run) -> None:
    """A rank that failed since it had lost another is not the first failure, though it failed earlier."""
    job = run_launch(
        """
        def work():
            path = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/1/", "/0/") + ".pid"
            if os.environ["RANK"] == "0":
                with open(path + ".new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(path + ".new", path)
                raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
            while not os.path.exists(path) or is_running(open(path).read()):
                time.sleep(0.01)
            raise ValueError("the cause")

        def is_running(pid):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    return file.read().rpartition(")")[2].split()[0] != "Z"
            except FileNotFoundError:
                return False
        """,
        """
        error = fail(work, count=2)
        rank, failure = error.get_first_failure()
        say(rank, failure.message["message"], sorted(error.failures))
        """,
        method,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "1 ValueError: the cause [0, 1]\n"


@all_methods
def test_an_interrupt_prints_no_traceback_of_workers(method: str, run_launch: Run) -> None:
    """Ctrl-C in the launching program, a notebook say, ends the functions without a word of theirs on stderr."""
    job = run_launch(
        "def work(): say('ready'); signal.pause()",
        """
        from elastic_run.multiprocessing.api import SignalException
        try:
            fail(work, count=2)
        except SignalException as error:
            say(error.sigval.name)
        """,
        method,
    )
    job.wait_lines("ready", count=2)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "SIGINT"
    assert [line for line in job.stderr.splitlines() if not line.startswith("elastic-run: ")] == []
