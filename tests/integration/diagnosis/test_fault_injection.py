"""--inject-fault on real jobs: each fault comes at its time, in its worker, and is told."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.system import memory_limit
from tests.support.wait import stretched

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


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


def closing_report(errors: str) -> str:
    """Return the closing report in one line."""
    return " ".join(errors.partition("-- elastic-run: ")[2].split())


@pytest.mark.long
def test_an_exception_in_another_thread(launch: Launch, worker: Worker) -> None:
    """The youngest thread of the program ends with the exception; the main thread goes on."""
    path = worker(
        "import threading\n"
        "def run():\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "import time\n"
        "thread = threading.Thread(target=run, name='loader', daemon=True)\n"
        "thread.start()\n"
        "thread.join()\n"
        "say('joined')"
    )
    job = launch(f"--inject-fault=raise-in-thread@{stretched(0.5):.1f}s", path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "joined\n"
    assert "exception in another thread: rank 0 (pid " in job.stderr
    assert "Exception in thread loader" in job.stderr
    job = launch(
        f"--inject-fault=raise-in-thread@{stretched(0.5):.1f}s,exit=3@{stretched(3):.1f}s", worker(_RUNS_ALONE)
    )
    assert job.wait_exit() == 3
    assert "raise-in-thread has no effect in pid " in job.stderr


_RUNS_ALONE = f"import time\n{_RUNS}"


@pytest.mark.long
def test_a_frozen_node(launch: Launch, worker: Worker) -> None:
    """Agent and workers are stopped: a node that doesn't obey is lost; after the pause it goes on and joins again."""
    port = free_port()
    conf = "keep_alive_interval=0.5,keep_alive_max_attempt=3,last_call_timeout=0"
    flags = (*place(port, conf), "--nnodes=2", "--max-restarts=1", "--inject-fault=freeze=5s@1s:rank=1")
    path = worker("say('there')\nif rank == 0 and attempt == 0:\n    time.sleep(2)\n    sys.exit(1)\nsignal.pause()")
    first = launch(*flags, "--node-rank=0", path)
    wait_coordinated(port)  # the store is on the node that goes on
    second = launch(*flags, "--node-rank=1", path)
    second.wait_line("SIGSTOP to this agent and its workers, of rank 1, after 1.0 s")
    first.wait_line("silent for 1.5 s")
    second.wait_line("new round: 2 nodes")
    for agent in (first, second):
        agent.send(signal.SIGTERM)
    assert first.wait_exit() == 128 + signal.SIGTERM


#: A machine whose control groups have no memory limit.
_WITHOUT_CGROUPS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh")


@pytest.mark.system
def test_memory_without_a_limit_is_not_taken(launch: Launch, worker: Worker) -> None:
    """The OOM killer might end anything on the machine: without a limit of the job's own nothing is started."""
    job = launch("--inject-fault=oom", worker("say('started')"), program=(*_WITHOUT_CGROUPS, *ELASTIC_RUN))
    assert job.wait_exit() == 2
    assert job.stdout == ""
    assert job.stderr.endswith("has oom, but no control group limits the memory of this job\n")


def test_memory_within_a_limit(launch: Launch, worker: Worker) -> None:
    """The kernel's OOM killer ends the worker of the rank, and neither the launcher nor the other worker."""
    # A worker that starts while the victim is being ended asks for memory, and the kernel ends one process more.
    flags = ("--nproc-per-node=2", f"--inject-fault=oom@{stretched(1):.1f}s:rank=1")
    with memory_limit(150) as prefix:
        job = launch(*flags, worker("signal.pause()"), program=(*prefix, *ELASTIC_RUN))
        assert job.wait_exit() == 128 + signal.SIGKILL
    report = closing_report(job.stderr)
    assert "cause rank 1 on " in report, job.stderr
    assert re.search("OOM killer (ended it|was at work)|out of memory: Killed process", report), report
