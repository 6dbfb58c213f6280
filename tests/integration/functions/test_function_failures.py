"""What a program that launches is told of its workers' failures, interrupts and bad moments."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import Launched
from tests.support.programs import all_methods, write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Launched]


_HEAD = """
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
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a program made of its functions and what it does as the main program."""
    started: list[Launched] = []

    def start(functions: str, main: str, method: str = "spawn") -> Launched:
        path = write_program(tmp_path / "host.py", _HEAD, functions, main)
        started.append(Launched((sys.executable, path, method), env=dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.close()


@all_methods
def test_a_traceback_begins_in_the_function(method: str, run: Run) -> None:
    """What is recorded of an exception has the user's frames, and none of how the function was called."""
    job = run(
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
def test_a_command_that_recorded_nothing(program: str, message: str, callstack: str, run: Run) -> None:
    """The failure of a command without `@record` has what its stderr said, in the form of a recorded exception."""
    job = run(
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
def test_the_first_failure_is_the_root_cause(method: str, run: Run) -> None:
    """A rank that failed since it had lost another is not the first failure, though it failed earlier."""
    job = run(
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
def test_an_interrupt_prints_no_traceback_of_workers(method: str, run: Run) -> None:
    """Ctrl-C in the launching program, a notebook say, ends the functions without a word of theirs on stderr."""
    job = run(
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


def test_an_interrupt_that_nobody_sent_is_a_failure(run: Run) -> None:
    """A KeyboardInterrupt of the function's own is told as what it is, with its place."""
    job = run(
        "def work(): raise KeyboardInterrupt('by hand')",
        """
        _, failure = fail(work).get_first_failure()
        say(failure.exitcode, failure.message["message"])
        say("in work" in failure.message["extraInfo"]["py_callstack"])
        """,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "130 KeyboardInterrupt: by hand\nTrue\n"
    assert job.stderr == ""
