"""--inject-fault on real jobs: each fault comes at its time, in its worker, and is told."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def test_a_killed_worker(launch: Launch, worker: Worker) -> None:
    """The worker of the given rank gets SIGKILL in the first attempt only, and a line says by whom."""
    path = worker("say(f'rank {rank} attempt {attempt}')\nif attempt == 0:\n    signal.pause()")
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--inject-fault=kill@0.2s:rank=1", path)
    assert job.wait_exit() == 0, job.stderr
    # On a busy machine a worker dies before its first line.
    again = [line for line in job.stdout.splitlines() if line.endswith("attempt 1")]
    assert sorted(again) == ["rank 0 attempt 1", "rank 1 attempt 1"]
    assert job.stderr.count("(--inject-fault)") == 1
    assert "elastic-run: SIGKILL to rank 1 (pid " in job.stderr
    assert "rank 1 (local 1, pid " in job.stderr
    assert "was killed by SIGKILL" in job.stderr


def test_a_worker_that_is_stopped_for_a_while_goes_on(launch: Launch, worker: Worker) -> None:
    """A worker that is stopped sees nothing of the pause but the time, and the job succeeds."""
    path = worker(
        "import time\n"
        "last = time.monotonic()\n"
        "longest = 0.0\n"
        "end = last + 60\n"
        "while longest < 0.4 and last < end:\n"
        "    time.sleep(0.01)\n"
        "    longest, last = max(longest, time.monotonic() - last), time.monotonic()\n"
        "say('paused', longest >= 0.4)"
    )
    # Several times, because a worker on a busy machine takes its time to start.
    pauses = ",".join(f"stop=0.5s@{second}s" for second in (0.5, 2, 5, 15, 30))
    job = launch(f"--inject-fault={pauses}", path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "paused True\n"
    assert "SIGSTOP to rank 0" in job.stderr


def test_any_signal(launch: Launch, worker: Worker) -> None:
    """A signal by name ends the job as it would from anywhere else."""
    job = launch("--inject-fault=signal=SIGSEGV@0.1s", worker("signal.pause()"))
    assert job.wait_exit() == 128 + signal.SIGSEGV
    assert "SIGSEGV to rank 0" in job.stderr


def test_a_killed_agent(launch: Launch, worker: Worker) -> None:
    """The agent of the rank's node dies at once, and no worker outlives it."""
    job = launch("--inject-fault=agent@0.2s", worker("say('there')\nsignal.pause()"))
    assert job.wait_exit() == -signal.SIGKILL
    assert "SIGKILL to this agent, of rank 0, after 0.20 s (--inject-fault)" in job.stderr


#: Runs Python code for ever.
_RUNS = "say('there')\nwhile True:\n    time.sleep(0.01)"


@pytest.mark.parametrize("preload", [(), ("--preload=json",)], ids=["cold", "warm"])
def test_an_exception(preload: tuple[str, ...], launch: Launch, worker: Worker) -> None:
    """The main thread raises an exception, and the report shows where in the program."""
    fault = f"--inject-fault=raise@{stretched(0.5):.1f}s:rank=1"
    job = launch("--nproc-per-node=2", *preload, fault, worker(f"import time\n{_RUNS}"))
    assert job.wait_exit() == 1
    assert "exception in the main thread: rank 1 (pid " in job.stderr
    report = " ".join(job.stderr.partition("-- elastic-run: ")[2].split())
    assert "cause rank 1 on " in report
    assert "InjectedFaultError: --inject-fault asked for it" in report
    assert re.search(r"/worker\d*\.py:\d+ in <module>", report), report


@pytest.mark.parametrize(("fault", "code"), [("exit=7", 7), ("exit=0", 0), ("exit", 1)])
def test_an_exit_code(fault: str, code: int, launch: Launch, worker: Worker) -> None:
    """The worker ends with the given exit code, which may be 0."""
    job = launch(f"--inject-fault={fault}@0.2s", worker("signal.pause()"))
    assert job.wait_exit() == code
    assert f"exit with code {code}: rank 0 (pid " in job.stderr


@pytest.mark.parametrize(
    ("fault", "place"),
    [("sleep", "rank 0 is in sleep_for_ever (worker"), ("hold-gil", "rank 0 is in hold_gil (worker")],
)
def test_a_hang(fault: str, place: str, launch: Launch, worker: Worker) -> None:
    """The hang report names the place where the main thread sleeps, or holds the GIL in C code."""
    path = worker(f"import time\n{_RUNS}")
    fault = f"--inject-fault={fault}@{stretched(0.5):.1f}s"  # the program runs by then
    job = launch(fault, "--hang-timeout=1", "--hang-action=fail", "--shutdown-timeout=1", path)
    assert job.wait_exit() == contract.EXIT_HUNG, job.stderr
    assert place in job.stderr, job.stderr


def test_a_child(launch: Launch, worker: Worker) -> None:
    """The signal goes to a child process of the worker, as when a data loader dies."""
    path = worker("import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nsay('end', child.wait())")
    delay = f"{stretched(1):.1f}"
    job = launch(f"--inject-fault=child=SIGKILL@{delay}s:rank=0", path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "end -9\n"
    assert f"a child process of rank 0, after {delay} s (--inject-fault)" in job.stderr
    job = launch("--inject-fault=child=SIGKILL", worker("say('there')\nopen(sys.argv[1]).read()"), "/dev/null")
    assert job.wait_exit() == 0


def test_a_program_that_is_no_python(launch: Launch) -> None:
    """It can't raise, and a line says so; it goes on."""
    job = launch("--no-python", "--inject-fault=raise", "sleep", "11")
    assert job.wait_exit() == 0, job.stderr
    assert "no exception in the main thread: rank 0 (pid " in job.stderr
    assert "is no Python that has elastic-run" in job.stderr
