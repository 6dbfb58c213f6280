"""`elastic_run.spawn`: a function in several processes, in the manner of torch.multiprocessing.spawn."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.functions.spawn import ProcessExitedException, ProcessRaisedException
from tests.support.launch import Launched
from tests.support.processes import wait_gone
from tests.support.programs import all_methods, write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Launched]


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


def test_exceptions_can_be_pickled() -> None:
    """The exceptions keep all they say on their way to another process."""
    raised = pickle.loads(pickle.dumps(ProcessRaisedException("text", 1, 23)))  # noqa: S301 - made here
    exited = pickle.loads(pickle.dumps(ProcessExitedException("text", 1, 23, -9, "SIGKILL")))  # noqa: S301 - ditto
    assert (raised.msg, raised.error_index, raised.error_pid) == ("text", 1, 23)
    assert (exited.error_index, exited.exit_code, exited.signal_name) == (1, -9, "SIGKILL")
