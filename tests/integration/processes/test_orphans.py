"""What outlives the launcher: nothing, also where its guardian was killed with it or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import descendants_of, kill_processes, wait_gone, wait_guardians
from tests.support.wait import stretched

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched, Worker


#: Says its own pid and those of a child in the session and of one in a session of its own, and waits.
_FAMILY = """
near = subprocess.Popen(["sleep", "1000"])
far = subprocess.Popen(["sleep", "1000"], start_new_session=True)
say("pids", os.getpid(), near.pid, far.pid)
while True: signal.pause()
"""
#: Seconds in which all has to be gone.
_LIMIT = 2.0


def _start(launch: Launch, worker: Worker, *flags: str) -> tuple[Launched, list[int]]:
    job = launch("--standalone", "--nproc-per-node=2", *flags, worker(_FAMILY))
    found = job.wait_lines(r"pids (\d+) (\d+) (\d+)", count=2)
    return job, [int(pid) for match in found for pid in match.groups()]


def _wait_all_gone(pids: list[int]) -> None:
    end = time.monotonic() + stretched(_LIMIT)
    try:
        for pid in pids:
            wait_gone(pid, deadline=max(0.05, end - time.monotonic()))
    finally:
        kill_processes(pids)


@pytest.mark.parametrize("order", ["launcher first", "guardian first"])
def test_launcher_and_guardian_killed_together(launch: Launch, worker: Worker, order: str) -> None:
    """The second guardian does what the first one can't do any more, for children in sessions of their own too."""
    job, pids = _start(launch, worker)
    first, second = wait_guardians(job.pid)
    both = [job.pid, first]
    kill_processes(both if order == "launcher first" else both[::-1])
    _wait_all_gone([*pids, second])
    job.wait_exit()


@pytest.mark.parametrize("flags", [(), ("--preload=json",)], ids=["executed", "preloaded"])
def test_all_killed_whose_command_line_names_the_launcher(launch: Launch, worker: Worker, flags: tuple[str]) -> None:
    """`pkill -9 -f elastic` finds the launcher and its template, and neither guardian: they end the workers."""
    job, pids = _start(launch, worker, *flags)
    guardians = wait_guardians(job.pid)
    processes = [pid for pid in (job.pid, *descendants_of(job.pid)) if pid not in pids]
    named = [pid for pid in processes if b"elastic" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(named) == 1 + len(flags)
    kill_processes(named)
    _wait_all_gone([*pids, *guardians])
    job.wait_exit()


def test_a_stopped_guardian_and_a_killed_launcher(launch: Launch, worker: Worker) -> None:
    """The second guardian acts instead of one that doesn't, and kills it."""
    job, pids = _start(launch, worker)
    first, second = wait_guardians(job.pid)
    os.kill(first, signal.SIGSTOP)
    job.send(signal.SIGKILL)
    _wait_all_gone([*pids, first, second])
    job.wait_exit()


def test_a_stopped_second_guardian(launch: Launch, worker: Worker) -> None:
    """The first one needs no help."""
    job, pids = _start(launch, worker)
    first, second = wait_guardians(job.pid)
    os.kill(second, signal.SIGSTOP)
    job.send(signal.SIGKILL)
    try:
        _wait_all_gone([*pids, first])
    finally:
        os.kill(second, signal.SIGCONT)
    wait_gone(second)
    job.wait_exit()


def test_the_second_guardian_stands_in_until_there_is_another_pair(launch: Launch, worker: Worker) -> None:
    """A killed guardian is replaced with its second one, and no guardian is left when the job has ended."""
    job, pids = _start(launch, worker)
    before = wait_guardians(job.pid)
    os.kill(before[0], signal.SIGKILL)
    wait_gone(before[1])
    after = wait_guardians(job.pid)
    kill_processes([after[0], job.pid])
    _wait_all_gone([*pids, *after])
    job.wait_exit()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_guardian_is_left_at_the_end(
    launch: Launch,
    worker: Worker,
    is_stopped: bool,
) -> None:
    """Both leave when the job has ended, also where the first one was stopped meanwhile."""
    job, _ = _start(launch, worker)
    guardians = wait_guardians(job.pid)
    if is_stopped:
        os.kill(guardians[0], signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    _wait_all_gone(guardians)


#: A launcher whose guardian is stopped as soon as it stands.
_STOPPED = """
import os, runpy, signal, sys
from elastic_run.multiprocessing import guardian
start = guardian.Guardian.start
def start_stopped(self):
    pid = start(self)
    os.kill(pid, signal.SIGSTOP)
    return pid
guardian.Guardian.start = start_stopped
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_guardian_holds_nothing_up(launch: Launch, tmp_path: Path, end: signal.Signals) -> None:
    """The job restarts and ends without its guardian, and a guardian that goes on knows all."""
    path = tmp_path / "worker.sh"
    path.write_text(
        "[ $TORCHELASTIC_RESTART_COUNT -lt 5 ] && exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n"
        "echo last $$\nexec sleep 1000\n"
    )
    flags = ("--standalone", "--max-restarts=9", "--max-backoff=0", "--no-python", "sh", path)
    job = launch(*flags, program=(sys.executable, "-c", _STOPPED))
    pid = int(job.wait_line(r"last (\d+)")[1])
    (guardian,) = (child for child in descendants_of(job.pid) if child != pid)
    if end == signal.SIGKILL:
        os.kill(guardian, signal.SIGCONT)
    job.send(end)
    assert job.wait_exit() == (143 if end == signal.SIGTERM else -9)
    _wait_all_gone([pid, guardian])


#: A launcher that dies while it replaces its guardian, when the one before has been told to leave.
_DYING = """
import os, runpy, signal, sys
from elastic_run.multiprocessing import guardian
fork, forks = guardian._fork, []
def fork_once(*arguments):
    forks.append(None)
    if len(forks) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fork(*arguments)
guardian._fork = fork_once
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


def test_a_launcher_killed_while_it_replaces_its_guardian(launch: Launch, worker: Worker) -> None:
    """The second guardian stands in until another one stands, not only until the launcher begins to start it."""
    flags = ("--standalone", "--nproc-per-node=2", worker(_FAMILY))
    job = launch(*flags, program=(sys.executable, "-c", _DYING))
    pids = [int(pid) for match in job.wait_lines(r"pids (\d+) (\d+) (\d+)", count=2) for pid in match.groups()]
    first, second = wait_guardians(job.pid)
    kill_processes([first])
    _wait_all_gone([*pids, second])
    assert job.wait_exit() == -signal.SIGKILL


_SECOND_STOPPED = """
import os, signal, subprocess, time
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.fork_exec import start_time
from elastic_run.multiprocessing.guardian import Guardian
guardian = Guardian(is_exec=True)
first = guardian.start()
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
guardian.watch(worker.pid, start_time(worker.pid))
def members(): return [*process_table.find_survivors({first: process_table.Session(0)}, "", since=0)]
while len(members()) < 2: time.sleep(0.005)
second = [pid for pid in members() if pid != first][0]
os.kill(second, signal.SIGSTOP)
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
# The kernel lets a stopped process go on when its parent's death leaves its process group alone.
os.kill(second, signal.SIGSTOP)
while process_table.read_stat(second).state != b"T": time.sleep(0.005)
"""


@pytest.mark.parametrize("rest", ["guardian.start()", "guardian.let_go(is_over=True)"], ids=["replaced", "over"])
def test_a_second_guardian_that_was_stopped_does_no_harm(rest: str, tmp_path: Path) -> None:
    """When it goes on it learns that it was replaced, or that the job is over, and leaves."""
    host = tmp_path / "host.py"
    end = (
        "\nos.kill(second, signal.SIGCONT)\n"
        "def lives(stat): return stat is not None and stat.state not in process_table.GONE_STATES\n"
        "while lives(process_table.read_stat(second)): time.sleep(0.005)\n"
        "print('worker', worker.poll(), flush=True)\n"
        "worker.kill()\n"
    )
    host.write_text(_SECOND_STOPPED + rest + end, encoding="utf-8")
    done = subprocess.run([sys.executable, host], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "worker None\n"
