r"""Stacks of running workers: on SIGQUIT (Ctrl-\), before SIGKILL, of workers of every kind."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.socket_directory import find_sockets
from elastic_run.signals import LOCK_STACK_SIGNAL, MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, STACK_SIGNAL
from tests.support.processes import children_of
from tests.support.sessions import free_port
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched, Worker


#: A rank that waits in a function of its own; the others wait elsewhere.
_SLEEPS = """
import time
def load_batch():
    say("ready", os.getpid())
    time.sleep(1000)
def step():
    say("ready", os.getpid())
    while True: signal.pause()
load_batch() if rank == 1 else step()
"""
_MANY_THREADS = """
import threading
lock = threading.Lock()
lock.acquire()
for _ in range({count}):
    threading.Thread(target=lock.acquire, daemon=True).start()
say("ready")
while True: signal.pause()
"""
#: A worker that is there for ever; a signal ends `signal.pause`.
_PAUSES = "say('ready')\nwhile True: signal.pause()"
_PAUSES_ALONE = f"import signal; say = print; {_PAUSES}".replace("('ready')", "('ready', flush=True)")
_ENDING = "the job goes on"

#: All signals for stacks.
_SIGNALS = [LOCK_STACK_SIGNAL, PYTHON_STACK_SIGNAL, MAIN_STACK_SIGNAL, STACK_SIGNAL]


def _ask(job: Launched, pattern: str, *, workers: int = 1) -> str:
    """Ask for the stacks until a pattern is found in a line: a busy machine answers late; return the line."""
    job.wait_lines("ready", count=workers)
    return wait_until(lambda: _ask_once(job, pattern), deadline=60, what=pattern)


def _ask_once(job: Launched, pattern: str) -> str:
    before = job.stderr.count(_ENDING)
    job.send(signal.SIGQUIT)
    job.wait_lines(_ENDING, count=before + 1)
    if found := re.search(f"elastic-run: .*{pattern}.*", job.stderr):
        return found.group()
    time.sleep(2.1)  # sooner, it would stop the job
    return ""


@pytest.mark.parametrize("options", [(), ("--preload=colorsys",)], ids=["cold", "preloaded"])
def test_the_odd_one_out_is_named(launch: Launch, worker: Worker, options: tuple[str, ...]) -> None:
    """SIGQUIT shows in one line which ranks are where; the job goes on, and nothing is mixed into its output."""
    job = launch("--standalone", "--nproc-per-node=3", *options, worker(_SLEEPS))
    _ask(job, r"ranks 0, 2 are in step \(worker1.py:\d+\); rank 1 is in load_batch \(worker1.py:\d+\)", workers=3)
    assert job.process.poll() is None
    assert len(job.stdout.splitlines()) == 3
    assert all(line.startswith("elastic-run: ") for line in job.stderr.splitlines())


def test_without_workers_the_first_ctrl_backslash_stops_nothing(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """One line says why there are no stacks; the second SIGQUIT stops the job."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    job = launch(*place, worker("pass"), env=environment)
    wait_until(lambda: find_sockets(environment)[0], what="the control socket")
    job.send(signal.SIGQUIT)
    job.wait_line(r"no worker runs now, the job is joining; the job goes on \(a second SIGQUIT within 2 s stops it\)")
    assert job.process.poll() is None
    job.send(signal.SIGQUIT)
    if job.process.poll() is None:  # on a busy machine it may have come too late
        job.send(signal.SIGTERM)
    job.wait_exit()


def test_while_the_job_stops_the_stacks_say_so(launch: Launch, worker: Worker) -> None:
    """The line does not say that the job goes on."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready')\nwhile True: signal.pause()"
    job = launch("--nproc-per-node=1", "--shutdown-timeout=600", worker(body))
    job.wait_line("ready")
    job.send(signal.SIGTERM)
    job.wait_line("stopping 1 worker")
    job.send(signal.SIGQUIT)
    job.wait_line("; the job is stopping")
    job.send(signal.SIGTERM)


def test_ranks_in_a_collective_wait(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Ranks in a collective of torch's wait for the rank that is not; the log directory has all stacks."""
    body = """
    import time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    def load_batch():
        say("ready")
        time.sleep(1000)
    if rank == 1:
        load_batch()
    else:
        say("ready")
        dist.barrier()
    """
    job = launch("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", worker(body))
    job.wait_lines("ready", count=2, deadline=120)
    _ask(job, r"rank 0 waits in barrier \(worker1.py:\d+\); rank 1 is in load_batch \(worker1.py:\d+\)", workers=2)
    path = Path(job.wait_line(r"all stacks: (\S+);").group(1))
    assert path.parent.parent == tmp_path / "logs"
    assert "=== rank 1\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "import ctypes\nsay('ready')\nwhile True: ctypes.PyDLL(None).sleep(1000)",
            r"rank 0 is in <module> \(worker1.py:\d+\)",
        ),
        ("say('ready')\nwhile True: pass", r"rank 0 is in <module> \(worker1.py:\d+\)"),
        (
            f"os.closerange(3, 4096)\n{_PAUSES}",
            "rank 0 has closed the descriptor for its stacks",
        ),
        (
            "os.execvp('sh', ['sh', '-c', 'echo ready; sleep 1000'])",
            r"rank 0 shows no Python stacks: it is not a Python program \(sh",
        ),
        (
            f"os.execv(sys.executable, [sys.executable, '-S', '-c', {_PAUSES_ALONE!r}])",
            "rank 0 shows no Python stacks: its Python does not read elastic-run-compat.pth: ",
        ),
        (
            f"for number in {_SIGNALS}: signal.signal(number, lambda *_: None)\n{_PAUSES}",
            f"rank 0 has a handler of its own for signal {STACK_SIGNAL}",
        ),
        (
            f"signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNALS})\n{_PAUSES}",
            f"rank 0 blocks signal {STACK_SIGNAL}",
        ),
        (
            f"signal.signal({STACK_SIGNAL}, signal.SIG_IGN)\n{_PAUSES}",
            f"rank 0 ignores signal {STACK_SIGNAL}",
        ),
        ("say('ready')\nos.kill(os.getpid(), signal.SIGSTOP)", "rank 0 is (stopped|in <module>)"),
        (_MANY_THREADS.format(count=60), r"rank 0 is in <module> \(worker1.py:\d+\)"),
        (_MANY_THREADS.format(count=120), r"rank 0 is in <module> \(worker1.py:\d+\)"),
        (
            "def parent():\n    say('ready')\n    while True: signal.pause()\nif os.fork(): parent()\nsignal.pause()",
            r"rank 0 is in parent \(worker1.py:\d+\)",
        ),
    ],
    ids=[
        "GIL",
        "busy",
        "closed",
        "exec",
        "no site",
        "handler",
        "blocked",
        "ignored",
        "stopped",
        "threads",
        "crowd",
        "fork",
    ],
)
def test_a_worker_of_any_kind_is_told(launch: Launch, worker: Worker, body: str, told: str) -> None:
    """A worker that can't answer is told, with what it does instead; none is harmed."""
    job = launch("--standalone", "--nproc-per-node=1", worker(body))
    _ask(job, told)
    assert len(children_of(job.pid)) >= 1
    assert job.process.poll() is None


def test_a_worker_whose_python_has_ended_lives_on(launch: Launch, worker: Worker) -> None:
    """A library that hangs at exit is told; a signal that comes just when Python has ended does not kill the worker."""
    body = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)
    say("ready", os.getpid())
    """
    job = launch("--standalone", worker(body))
    _ask(job, f"rank 0 ignores signal {STACK_SIGNAL}: its Python has ended, or the program asked for that")
    pid = int(job.wait_line(r"ready (\d+)")[1])
    os.kill(pid, STACK_SIGNAL)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert "rank 0 was stopped" in job.stderr


def test_the_second_time_stops_the_job(launch: Launch, worker: Worker) -> None:
    """SIGQUIT twice within two seconds stops the job as any other stop signal."""
    job = launch("--standalone", "--nproc-per-node=2", worker(_SLEEPS))
    job.wait_lines("ready", count=2)
    for count in itertools.count(1):  # on a busy machine an answer may take longer than that
        job.send(signal.SIGQUIT)
        try:
            job.wait_lines(_ENDING, count=count)
        except DeadlinePassedError:
            assert count > 1
            break
    assert job.wait_exit() == 128 + signal.SIGQUIT


def test_the_user_can_do_without(launch: Launch, worker: Worker) -> None:
    """With ELASTIC_RUN_STACKS=0 a worker has no handler and no pipe, and the first SIGQUIT stops the job."""
    body = "say('ready', [line for line in open('/proc/self/status') if 'SigCgt' in line])\nwhile True: signal.pause()"
    job = launch("--standalone", worker(body), env={"ELASTIC_RUN_STACKS": "0"})
    found = job.wait_line(r"SigCgt:\\t([0-9a-f]+)")
    assert not int(found[1], 16) >> (STACK_SIGNAL - 1) & 1
    job.send(signal.SIGQUIT)
    assert job.wait_exit() == 128 + signal.SIGQUIT


def test_a_program_sees_next_to_nothing_of_it(launch: Launch, worker: Worker) -> None:
    """A worker has no variable of it, and its children have neither handler nor descriptor."""
    body = """
    import subprocess
    assert "ELASTIC_RUN_STACK_PIPE" not in os.environ
    subprocess.run(
        ["sh", "-c", "grep SigCgt /proc/self/status; ls /proc/self/fd | tr '\\\\n' ' '; env | grep STACK_PIPE"],
        close_fds=False,
    )
    """
    job = launch("--standalone", worker(body))
    assert job.wait_exit() == 0, job.stderr
    caught, numbers = job.stdout.splitlines()
    assert not int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1
    assert all(int(number) < 100 for number in numbers.split())


_TELLS_TITLE = """
say(open("/proc/self/comm").read().strip(), open("/proc/self/cmdline").read().replace("\\0", " ").rstrip())
assert (sys.orig_argv[0], sys.argv) == (sys.executable, [__file__, "--lr", "1"]), sys.orig_argv
"""


def test_the_title_of_a_worker_shows_its_rank(launch: Launch, worker: Worker) -> None:
    """Its name, and the beginning of its command line; what the program sees of its arguments is as before."""
    path = worker(_TELLS_TITLE)
    job = launch("--standalone", "--nproc-per-node=2", path, "--lr", "1")
    assert job.wait_exit() == 0, job.stderr
    ends = [f"{sys.executable[8:]} -u {path} --lr 1" for _ in range(2)]
    assert sorted(job.stdout.splitlines()) == [f"python rank {rank} rank {rank}: {ends[rank]}" for rank in range(2)]


@pytest.mark.parametrize("name", ["ELASTIC_RUN_TITLE", "ELASTIC_RUN_STACKS"])
def test_a_title_can_be_left(launch: Launch, worker: Worker, name: str) -> None:
    """As under torchrun."""
    path = worker(_TELLS_TITLE)
    job = launch("--standalone", path, "--lr", "1", env={name: "0"})
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == f"{Path(sys.executable).name} {sys.executable} -u {path} --lr 1\n"


def test_stacks_come_before_sigkill(launch: Launch, worker: Worker) -> None:
    """A worker that does not stop in the grace period is shown before SIGKILL ends it, no later than without that."""
    body = """
    def save_checkpoint():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        while True:
            signal.pause()
    save_checkpoint()
    """
    job = launch("--standalone", "--shutdown-timeout=2", worker(body))
    job.wait_line("ready")
    told_at = time.monotonic()
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM
    assert "not stopped yet, SIGKILL follows: rank 0 is in save_checkpoint (worker1.py:" in job.stderr
    assert time.monotonic() - told_at > 1.9


def test_functions_of_every_start_method_tell(launch: Launch, tmp_path: Path) -> None:
    """Workers that are functions have the handler too, however they were started."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from elastic_run.launcher import LaunchConfig, elastic_launch\n"
        "def see():\n"
        "    mask = next(line for line in open('/proc/self/status') if 'SigCgt' in line).split()[1]\n"
        f"    return int(mask, 16) >> {STACK_SIGNAL - 1} & 1\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        place = {'rdzv_backend': 'c10d', 'rdzv_endpoint': 'localhost:0'}\n"
        "        config = LaunchConfig(1, 1, 2, run_id=method, start_method=method, **place)\n"
        "        print(method, elastic_launch(config, see)(), flush=True)\n",
        encoding="utf-8",
    )
    job = launch(program, program=(sys.executable,))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines() == [f"{method} {{0: 1, 1: 1}}" for method in ("spawn", "fork", "forkserver")]
