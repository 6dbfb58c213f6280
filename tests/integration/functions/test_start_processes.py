"""`start_processes` and its contexts: the same programs on torch's and on ours, and what ours does better."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import multiprocessing as ours
from tests.support.launch import Launched
from tests.support.processes import switches_within, wait_gone
from tests.support.programs import all_methods, write_program
from tests.support.torch_python import TorchPython
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Launched]

TORCHS, OURS = "torch.distributed.elastic.multiprocessing", "elastic_run.multiprocessing"
#: Seconds for a program that imports torch, on a machine that does much else.
_WAIT_LIMIT = 90.0

_HEAD = """
import os, signal, subprocess, sys, threading, time
from {package} import *
from {package} import DefaultLogsSpecs, SignalException, Std, start_processes

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def start(entrypoint, args, logs=None, **options):
    options.setdefault("start_method", sys.argv[1])
    envs = {{rank: {{"RANK": str(rank)}} for rank in args}}
    return start_processes("name", entrypoint, args, envs, logs or DefaultLogsSpecs(), **options)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a program made of its functions and what it does as the main program, with torch's package or ours."""
    started: list[Launched] = []

    def start(functions: str, main: str, *, method: str = "spawn", package: str = OURS) -> Launched:
        place = tmp_path / f"program_{package.partition('.')[0]}.py"
        path = write_program(place, _HEAD.format(package=package), functions, main)
        started.append(Launched((sys.executable, path, method), env=dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def torch_python() -> Iterator[TorchPython]:
    """Start the interpreter of torch's side."""
    with TorchPython() as python:
        yield python


@pytest.fixture
def on_both(run: Run, torch_python: TorchPython, tmp_path: Path) -> Callable[..., str]:
    """Return what a program says, which has to be the same on both."""

    def say(functions: str, main: str, method: str = "spawn") -> str:
        path = tmp_path / "program_torch.py"
        write_program(path, _HEAD.format(package=TORCHS), functions, main)
        # torch's processes are forked: spawned ones import torch, each of them.
        theirs = torch_python.run(path, "fork", deadline=_WAIT_LIMIT)
        assert theirs.returncode == 0, theirs.stderr
        job = run(functions, main, method=method)
        assert job.wait_exit(deadline=_WAIT_LIMIT) == 0, job.stderr
        assert theirs.stdout == job.stdout
        return job.stdout

    return say


def _wait_for_rest(job: Launched, seconds: float) -> None:
    """Wait until a program isn't woken up for so long."""
    wait_until(lambda: not switches_within(job.pid, seconds), what=f"a program at rest for {seconds} s")


@all_methods
def test_functions_on_both(method: str, on_both: Callable[..., str]) -> None:
    """Values, paths of logs and the flag of failure are the same as torch's, by local rank."""
    said = on_both(
        "def work(number): return number * 2, os.environ['RANK']",
        """
        processes = start(work, {0: (1,), 1: (2,)})
        result = processes.wait()
        processes.close()
        say(dict(sorted(result.return_values.items())), result.failures, result.stdouts, result.is_failed())
        say(sorted(processes.pids()), processes.nprocs, processes.name, processes.envs[1]["RANK"])
        """,
        method,
    )
    assert said.startswith("{0: (2, '0'), 1: (4, '1')} {} {0: '', 1: ''} False\n")


def test_failing_functions_on_both(on_both: Callable[..., str]) -> None:
    """The one that failed is the failure, with its recorded exception, and the others are stopped."""
    said = on_both(
        """
        def work(number):
            if number == 2:
                raise ValueError("two")
            time.sleep(1000)
        """,
        """
        result = start(work, {0: (1,), 1: (2,)}).wait()
        failure = result.failures[1]
        say(result.is_failed(), list(result.failures), failure.exitcode, failure.message["message"])
        """,
    )
    assert said == "True [1] 1 ValueError: two\n"


def test_commands_on_both(on_both: Callable[..., str]) -> None:
    """A command's arguments become strings; failures have exit codes, of those that were stopped for them too."""
    said = on_both(
        "",
        """
        result = start("/bin/sh", {0: ("-c", "test $0 = 5 && test $RANK = 0", 5), 1: ("-c", "true")}).wait()
        say(result.return_values, result.failures, result.is_failed())
        result = start("/bin/sh", {0: ("-c", "sleep 1000"), 1: ("-c", "exit 3")}).wait()
        say({rank: failure.exitcode for rank, failure in sorted(result.failures.items())})
        """,
    )
    assert said == "{0: None, 1: None} {} False\n{0: -15, 1: 3}\n"


def test_handlers_and_filtered_files_on_both(on_both: Callable[..., str], tmp_path: Path) -> None:
    """A command's processes are there by local rank, each with what Popen has, and so are the files of chosen lines."""
    said = on_both(
        "",
        f"""
        import tempfile
        logs = DefaultLogsSpecs(tempfile.mkdtemp(dir={str(tmp_path)!r}), tee=Std.OUT)
        processes = start("/bin/sleep", {{0: ("1000",), 1: ("1000",)}}, logs, duplicate_stdout_filters=["x"])
        handlers = processes.subprocess_handlers
        say(sorted(handlers), [handlers[rank].local_rank_id for rank in (0, 1)])
        say({{rank: handler.proc.pid for rank, handler in handlers.items()}} == processes.pids())
        say(handlers[1].proc.poll(), handlers[1].proc.returncode)
        say(os.path.basename(processes.filtered_stdout.name), processes.filtered_stderr)
        processes.filtered_stdout.write("a line of the agent\\n")
        handlers[1].close(signal.SIGTERM)
        say(handlers[1].proc.wait(60), handlers[1].proc.returncode)
        processes.close()
        say(processes.filtered_stdout.closed, open(processes.filtered_stdout.name).read().strip())
        say(handlers[0].proc.wait(60))
        """,
    )
    assert said.splitlines() == [
        "[0, 1] [0, 1]",
        "True",
        "None None",
        "filtered_stdout.log None",
        "-15 -15",
        "True a line of the agent",
        "-15",
    ]


def test_waiting_on_both(on_both: Callable[..., str]) -> None:
    """A timeout of 0 only looks, another one ends without a result, and closing stops what runs."""
    said = on_both(
        "",
        """
        processes = start("/bin/sleep", {0: ("1000",)})
        say(processes.wait(0), processes.wait(0.2, period=0.1))
        (pid,) = processes.pids().values()
        processes.close(signal.SIGINT, timeout=10)
        try: os.kill(pid, 0)
        except ProcessLookupError: say("gone")
        """,
    )
    assert said == "None None\ngone\n"


class PartialLogs(ours.DefaultLogsSpecs):
    """Leaves out what it is told to, as a plug-in may."""

    left_out = "error_files"

    def reify(self, envs: dict[int, dict[str, str]]) -> ours.LogsDest:
        """Lay out without one stream of the last rank."""
        logs = super().reify(envs)
        getattr(logs, self.left_out).pop(max(envs))
        return logs


def test_logs_specs_that_leave_out_a_worker() -> None:
    """Without a path for a stream nothing is started; without an error file a process may fail all the same."""
    processes = ours.start_processes("name", "/bin/false", {0: ()}, {0: {}}, PartialLogs())
    result = processes.wait()
    processes.close()
    assert result is not None
    assert result.failures[0].error_file == "<N/A>"
    specs = PartialLogs()
    specs.left_out = "stderrs"
    with pytest.raises(RuntimeError, match=r"PartialLogs\.reify has returned no stderrs for local rank 1; "):
        ours.start_processes("name", "/bin/true", {0: (), 1: ()}, {0: {}, 1: {}}, specs)


def test_a_stop_signal_on_both(run: Run) -> None:
    """In the main thread a stop signal raises SignalException out of `wait`; the program closes and goes on."""
    for package in (TORCHS, OURS):
        job = run(
            "",
            """
            processes = start("/bin/sleep", {0: ("1000",)})
            try:
                say("ready", *processes.pids().values())
                processes.wait()
            except SignalException as error:
                processes.close(error.sigval)
                say(error.sigval.name)
            """,
            package=package,
        )
        pid = int(job.wait_line(r"ready (\d+)", deadline=_WAIT_LIMIT)[1])
        # A signal that interrupts torch's look at a process makes it wait for that process in vain, for ever.
        _wait_for_rest(job, 0.3)
        job.send(signal.SIGTERM)
        assert job.wait_exit() == 0, job.stderr
        assert job.stdout.splitlines()[-1] == "SIGTERM"
        wait_gone(pid, deadline=0.1)


@all_methods
def test_handlers_are_put_back(method: str, run: Run) -> None:
    """After `close` the program answers signals as before, and nothing of the start is left open."""
    job = run(
        "def work(): return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL",
        """
        say(start(work, {0: ()}).wait().return_values)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = set(os.listdir("/proc/self/fd")), threading.active_count()
        processes = start(work, {0: (), 1: ()}, DefaultLogsSpecs(tee=Std.ALL))
        say(processes.wait().return_values)
        processes.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert before == (set(os.listdir("/proc/self/fd")), threading.active_count())
        """,
        method=method,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: True}\n{0: True, 1: True}\n", job.stderr


def test_a_command_that_is_not_there(run: Run) -> None:
    """A command that can't be started raises, and those before it are gone."""
    job = run("", "start('/no/such/program', {0: (), 1: ()})")
    assert job.wait_exit() == 1
    assert "FileNotFoundError" in job.stderr.splitlines()[-1]
