"""SIGCHLD that is ignored, handled, or whose children somebody else collects: exit codes stay what they are."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from tests.support.programs import write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Execs a command with SIGCHLD ignored, as some supervisors and shells start programs.
_IGNORING = (
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_HOST = """
import os, signal, sys, threading, time
from elastic_run.launcher import LaunchConfig, elastic_launch
from elastic_run.multiprocessing.errors import ChildFailedError

def work(value):
    return value

def run(entrypoint, *args):
    config = LaunchConfig(1, 1, 2, rdzv_backend="local", max_restarts=0, start_method="spawn")
    try:
        print("returned", elastic_launch(config, entrypoint)(*args), flush=True)
    except ChildFailedError as error:
        print("failed", {rank: failure.exitcode for rank, failure in error.failures.items()}, flush=True)
"""
#: What a program may do with SIGCHLD; each loses the exit codes of all children, ours too, unless we take care.
_HABITS = {
    "ignores": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "reaps": """
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
    seen.append(1)
seen = []
signal.signal(signal.SIGCHLD, reap)
before = signal.getsignal(signal.SIGCHLD)
""",
}


def _run(tmp_path: Path, body: str) -> list[str]:
    path = write_program(tmp_path / "host.py", _HOST, "", body)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_command_that_inherits_an_ignored_sigchld(launch: Launch, worker: Worker, restarts: int) -> None:
    """The job's exit code is right, and workers of every round have the default action: they may start processes."""
    path = worker("""
        say("default", signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, subprocess.run(["false"]).returncode)
        sys.exit(0 if attempt or "--once" in sys.argv else 7)
    """)
    once = () if restarts else ("--once",)
    program = (sys.executable, "-c", _IGNORING, "-m", "elastic_run")
    job = launch("--standalone", f"--max-restarts={restarts}", path, *once, program=program)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("default True 1") == restarts + 1


@pytest.mark.parametrize("habit", list(_HABITS))
@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("run('true')", r"returned \{0: None, 1: None\}"),
        ("run('sh', '-c', 'exit 3')", r"failed \{[01]: 3"),
        ("run(work, 5)", r"returned \{0: 5, 1: 5\}"),
    ],
)
def test_a_program_with_an_answer_of_its_own(tmp_path: Path, habit: str, call: str, line: str) -> None:
    """A job in a program that ignores SIGCHLD, or reaps every child in its handler, has the right end."""
    lines = _run(tmp_path, f"{_HABITS[habit]}\n{call}")
    assert re.match(line, lines[-1]), lines


def test_the_program_s_handler_is_called_and_comes_back(tmp_path: Path) -> None:
    """During the job the program's handler sees the ends of its own children, and afterwards all is as it was."""
    lines = _run(
        tmp_path,
        _HABITS["reaps"]
        + f"""
own = os.posix_spawnp("sh", ["sh", "-c", "until test -e {tmp_path / "begun"}; do sleep 0.01; done"], os.environ)
run("sh", "-c", f"> {tmp_path / "begun"}; while kill -0 {{own}}; do sleep 0.01; done")  # until the handler has it
print(bool(seen), signal.getsignal(signal.SIGCHLD) is before)
try: os.waitpid(own, os.WNOHANG)
except ChildProcessError: print("reaped by the handler")
""",
    )
    assert lines[1:] == ["True True", "reaped by the handler"], lines


def test_a_stolen_status_is_named(tmp_path: Path) -> None:
    """Where the kernel can't tell, the failure says who took the status, and a function's value counts."""
    thief = """
from elastic_run import loop
import elastic_run.agent.history as history
collect = loop.Loop._collect
def steal(self, pid):
    "Be the part of the program that collects each child before the loop does."
    try: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError: pass
    return collect(self, pid)
loop.Loop._collect = steal
run(work, 5)
ends = []
conclude = history.History.conclude
def note(self, *rest):
    result = conclude(self, *rest)
    ends.extend(end.remark for end in result.ends)
    return result
history.History.conclude = note
run("true")
print(ends[0])
"""
    lines = _run(tmp_path, thief)
    assert lines[0] == "returned {0: 5, 1: 5}", lines
    assert re.match(r"failed \{[01]: 255", lines[1]), lines  # of the worker whose end is seen first
    assert "exit status is unknown" in lines[2]
    assert "waitpid(-1)" in lines[2]


@pytest.fixture
def default_action() -> Iterator[None]:
    """Give SIGCHLD its default action: torch's DataLoader, once used, leaves a handler in the process of the tests."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("default_action")
def test_the_default_action_stays() -> None:
    """A loop leaves SIGCHLD alone where it has its default action."""
    with Loop() as loop:
        loop.keep_exits()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
