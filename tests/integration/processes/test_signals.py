"""Signals: those that no flag names, and SIGCHLD where others have an answer of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import place
from tests.support.programs import write_program
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker
    from tests.support.programs import Module


# --- signals that no flag names ---------------------------------------------------------------------------------------
#: This test, as the launcher's lines have it.
SENDER = rf"pid {os.getpid()} \(\S.*\)"
#: Ranks that are listed handle the signal; all end with 0 once the gate is opened and closed.
WORKER = """
import select
number, handling, gate = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
if str(rank) in handling:
    signal.signal(number, lambda *_: say(f"rank {rank} saves"))
blocked = next(line for line in open("/proc/self/status") if line.startswith("SigBlk"))
# Open before the line: whoever opened it after the test's writer has gone would wait for another one.
opened = select.poll()
opened.register(os.open(gate, os.O_RDONLY | os.O_NONBLOCK))
say("ready, blocked", int(blocked.split()[1], 16))
opened.poll()
"""
#: Waits for a stop, and tells which signal it was.
PATIENT = """
def stop(number, _):
    say("got", signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
say("ready")
while True:
    signal.pause()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Make the FIFO at which workers wait."""
    path = tmp_path / "workers-gate"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGIO, signal.SIGRTMIN + 3])
def test_the_workers_that_handle_a_signal_get_it(launch: Launch, worker: Worker, gate: Path, number: int) -> None:
    """A worker with a handler gets a signal that no flag names, one without does not, and the job goes on."""
    job = launch("--standalone", "--nproc-per-node=2", worker(WORKER), str(int(number)), "0", str(gate))
    job.wait_lines("ready, blocked 0$", count=2)
    os.kill(job.pid, number)
    job.wait_line(rf": SIG\S+ from {SENDER}: passed on to rank 0; the other workers don't handle it$")
    job.wait_line("rank 0 saves")
    gate.write_text("")
    assert job.wait_exit() == 0, job.stderr


def test_a_signal_that_no_worker_handles(launch: Launch, worker: Worker, gate: Path) -> None:
    """Where no worker handles a signal nothing is sent, one line says so, and the job goes on."""
    job = launch("--standalone", "--nproc-per-node=2", worker(WORKER), "10", "none", str(gate))
    job.wait_lines("ready", count=2)
    job.send(signal.SIGUSR2)
    job.wait_line(rf"^elastic-run: SIGUSR2 from {SENDER}: no worker handles it: nothing was sent$")
    gate.write_text("")
    assert job.wait_exit() == 0, job.stderr


def test_a_signal_at_once(launch: Launch, worker: Worker) -> None:
    """A signal that comes while the launcher still imports is answered as any other, also after a restart."""
    path = worker("""
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        os.kill(os.getppid(), signal.SIGUSR1)
        while not got:
            signal.pause()
        say("saved", os.getpid(), 1 - attempt)
        sys.exit(1 - attempt)
    """)
    job = launch("--standalone", "--max-restarts=1", path)
    assert job.wait_exit() == 0, job.stderr
    pids = re.findall(r"saved (\d+)", job.stdout)
    assert re.findall(r"SIGUSR1 from pid (\d+) \(.*\): passed on to rank 0", job.stderr) == pids


def test_warm_workers(launch: Launch, worker: Worker, module: Module, gate: Path) -> None:
    """A forked worker (--preload) gets the signals that it handles, and begins with none blocked."""
    environment = module("")
    flags = ("--standalone", "--nproc-per-node=2", "--preload=heavy")
    job = launch(*flags, worker(WORKER), str(int(signal.SIGUSR1)), "0,1", str(gate), env=environment)
    job.wait_lines("ready, blocked 0$", count=2)
    job.send(signal.SIGUSR1)
    job.wait_line(rf"SIGUSR1 from {SENDER}: passed on to ranks 0-1$")
    job.wait_lines("saves", count=2)
    gate.write_text("")
    assert job.wait_exit() == 0, job.stderr


@pytest.mark.parametrize("name", ["SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGPWR", "SIGHUP"])
def test_a_limit_or_a_timer_stops_the_job(launch: Launch, worker: Worker, name: str) -> None:
    """A signal that stands for a limit or a timer stops the job: workers get SIGTERM, and the code is 128 + n."""
    number = signal.Signals[name]
    job = launch("--standalone", "--signals-to-handle=SIGTERM", worker(PATIENT))
    job.wait_line("ready")
    job.send(number)
    assert job.wait_exit() == 128 + number
    assert "got SIGTERM" in job.stdout
    assert re.search(rf"{name} received from {SENDER}: stopping 1 worker", job.stderr), job.stderr
    assert re.search(rf"^cause +{name} came from {SENDER}$", job.stderr, re.MULTILINE), job.stderr


def test_an_inherited_alarm(launch: Launch, worker: Worker) -> None:
    """A timer that was set before elastic-run began (alarm, then exec) stops the job with a line."""
    code = "import os, signal, sys; signal.setitimer(signal.ITIMER_REAL, 1); os.execv(sys.argv[1], sys.argv[1:])"
    job = launch("--standalone", worker(PATIENT), program=(sys.executable, "-c", code, *ELASTIC_RUN))
    assert job.wait_exit() == 128 + signal.SIGALRM
    assert "SIGALRM received from the kernel: stopping 1 worker" in job.stderr


def test_a_flag_goes_first(launch: Launch, worker: Worker) -> None:
    """--forward-signals passes a signal on to workers without a handler too, and the report says where it came from."""
    path = worker("say('ready')\nsignal.pause()\n")
    job = launch("--standalone", "--forward-signals=SIGUSR1", path)
    job.wait_line("ready")
    job.send(signal.SIGUSR1)
    assert job.wait_exit() == 128 + signal.SIGUSR1
    report = " ".join(job.stderr.split())
    assert "was killed by SIGUSR1" in report
    assert re.search(rf"elastic-run passed on the SIGUSR1 that it got from {SENDER}", report), report
    assert "The script has no handler for this signal" in report


def test_several_nodes(launch: Launch, worker: Worker, gate: Path) -> None:
    """Nodes of a job answer for their own workers, and know senders though they have more threads."""
    port, flags = free_port(), ("--nnodes=2", "--nproc-per-node=1")
    words = (worker(WORKER), str(int(signal.SIGUSR1)), "0,1", str(gate))
    agents = [launch(*place(port), *flags, *words) for _ in range(2)]
    for agent in agents:
        agent.wait_line("ready, blocked 0$")
    for agent in agents:
        agent.send(signal.SIGUSR1)
        agent.wait_line(rf"SIGUSR1 from {SENDER}: passed on to rank \d$")
        agent.wait_line("saves")
    agents[0].send(signal.SIGTERM)
    agents[0].wait_line(rf"SIGTERM received from {SENDER}: stopping 1 worker")
    assert agents[0].wait_exit() == 143
    agents[1].close()


def test_a_program_keeps_its_handlers(launch: Launch, tmp_path: Path, worker: Worker, gate: Path) -> None:
    """In a program that launches a job (elastic_launch) a signal goes to the program's own handler."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys\n"
        "from elastic_run import LaunchConfig, elastic_launch\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('the program has it', flush=True))\n"
        "config = LaunchConfig(1, 1, 1, rdzv_backend='local', max_restarts=0)\n"
        "elastic_launch(config, sys.executable)(*sys.argv[1:])\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)\n"
    )
    words = (worker(WORKER), str(int(signal.SIGUSR1)), "0", str(gate))
    job = launch(*words, program=(sys.executable, str(program)))
    job.wait_line("ready, blocked 0$")
    job.send(signal.SIGUSR1)
    job.wait_line("the program has it")
    gate.write_text("")
    assert job.wait_exit() == 0, job.stderr
    assert "saves" not in job.stdout
    assert job.stdout.endswith("set()\n")


# --- SIGCHLD ----------------------------------------------------------------------------------------------------------
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
