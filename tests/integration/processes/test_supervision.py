"""The running launcher: stops, signals, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import children_of, is_gone, wait_gone
from tests.support.system import as_pid_1
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker
    from tests.support.terminal import Terminal


#: A worker that is there until it is told to go, and says so.
PATIENT = """
def stop(number, _):
    say("rank", rank, "got", signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, stop)
say("rank", rank, "ready", os.getpid())
while True:
    signal.pause()
"""
#: A worker that ignores every request to stop.
DEAF = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
say("rank", rank, "ready", os.getpid())
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(7)", 7),
        ("raise ValueError('no')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os._exit(255)", 255),
    ],
)
def test_exit_code_is_the_root_causes(launch: Launch, worker: Worker, ending: str, code: int) -> None:
    """The launcher ends with the failed worker's exit code, 128 + n for a signal."""
    path = worker(f"if rank == 1:\n    {ending}\nsignal.pause()")
    job = launch("--standalone", "--nproc-per-node=2", path)
    assert job.wait_exit() == code


def _fails_when_the_other_is_ready(code: int, other: str, gate: Path) -> str:
    """Return a worker program: rank 1 fails as soon as rank 0 has come to its loop; a FIFO makes it wait."""
    os.mkfifo(gate)
    opened = f"open({str(gate)!r}, 'w').close()\nwhile True:"
    return f"if rank == 1:\n    open({str(gate)!r}).read(); sys.exit({code})\n{other.replace('while True:', opened)}"


def test_siblings_are_told_and_get_their_grace(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """When one worker fails the others get SIGTERM and time to finish."""
    path = worker(_fails_when_the_other_is_ready(3, PATIENT, tmp_path / "gate"))
    job = launch("--standalone", "--nproc-per-node=2", path)
    assert job.wait_exit() == 3
    assert "rank 0 got SIGTERM" in job.stdout


def test_grace_period_ends_with_kill(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A worker that ignores SIGTERM is killed at the end of --shutdown-timeout, on the failure path too."""
    path = worker(_fails_when_the_other_is_ready(3, DEAF, tmp_path / "gate"))
    job = launch("--standalone", "--nproc-per-node=2", "--shutdown-timeout=1", path)
    assert job.wait_exit() == 3
    assert 1.0 < time.monotonic() - job.started_at < stretched(10)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_stops_the_job(launch: Launch, worker: Worker, name: str) -> None:
    """A stop signal reaches the workers as itself, and the launcher ends with 128 + n."""
    number = signal.Signals[name]
    job = launch("--standalone", "--nproc-per-node=2", worker(PATIENT))
    job.wait_lines("ready", count=2)
    job.send(number)
    assert job.wait_exit() == 128 + number
    assert job.stdout.count(f"got {name}") == 2


def test_second_interrupt_hurries(launch: Launch, worker: Worker) -> None:
    """A second Ctrl-C ends a stop that would take the whole grace period."""
    job = launch("--standalone", "--nproc-per-node=2", "--shutdown-timeout=60", worker(DEAF))
    job.wait_lines("ready", count=2)
    job.send(signal.SIGINT)
    job.wait_line("SIGINT")
    job.send(signal.SIGINT)
    assert job.wait_exit(deadline=20) == 130


def test_inherited_ignored_signal_stays_ignored(launch: Launch, worker: Worker) -> None:
    """Nohup works: a hang-up neither ends the launcher nor the workers."""
    job = launch("--standalone", worker(PATIENT), program=("nohup", *_ELASTIC_RUN))
    job.wait_line("ready")
    job.send(signal.SIGHUP)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert "SIGHUP" not in job.stdout


def test_forwarded_signal_stops_nothing(launch: Launch, worker: Worker) -> None:
    """--forward-signals passes a signal on to every worker, and the job goes on."""
    path = worker("""
        signal.signal(signal.SIGUSR1, lambda *_: say("rank", rank, "saves"))
        signal.signal(signal.SIGUSR2, lambda *_: (say("rank", rank, "ends"), os._exit(0)))
        say("ready")
        while True: signal.pause()
    """)
    job = launch("--standalone", "--nproc-per-node=2", "--forward-signals=SIGUSR1,SIGUSR2", path)
    job.wait_lines("ready", count=2)
    job.send(signal.SIGUSR1)
    job.wait_lines("saves", count=2)
    job.send(signal.SIGUSR2)
    assert job.wait_exit() == 0
    assert job.stdout.count("ends") == 2


def test_stopped_launcher_loses_nothing(launch: Launch, worker: Worker) -> None:
    """What happens while the launcher is stopped (job control) is dealt with when it goes on."""
    path = worker("""
        say("ready", os.getpid())
        print("last words", file=sys.stderr)
        sys.exit(5 if attempt == 0 else 0)
    """)
    job = launch("--standalone", "--max-restarts=1", path)
    job.send(signal.SIGSTOP)
    job.send(signal.SIGCONT)
    assert job.wait_exit() == 0
    assert job.stderr.count("last words") == 2


def test_grandchildren_die_with_a_failed_worker(launch: Launch, worker: Worker) -> None:
    """Children of a failed worker go with it, also one that left the session and one that ignores SIGTERM."""
    path = worker("""
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1001"], start_new_session=True)
        subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1000; done"])
        sys.exit(4)
    """)
    job = launch("--standalone", "--nproc-per-node=2", "--shutdown-timeout=1", path)
    assert job.wait_exit() == 4
    # The fixture looks for what is left.


def test_leftovers_of_a_success_are_stopped(launch: Launch, worker: Worker) -> None:
    """With --kill-background-processes a process that a worker leaves behind does not outlive the job."""
    path = worker("subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    job = launch("--standalone", "--kill-background-processes", path)
    assert job.wait_exit() == 0


@pytest.mark.parametrize("_turn", range(5))
def test_nothing_survives_a_killed_launcher(launch: Launch, worker: Worker, _turn: int) -> None:
    """After SIGKILL of the launcher its workers and their descendants are gone within two seconds."""
    path = worker("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
        say("pids", os.getpid(), *(child.pid for child in children))
        while True: signal.pause()
    """)
    job = launch("--standalone", "--nproc-per-node=2", path)
    pids = [int(pid) for match in job.wait_lines(r"pids (.*)", count=2) for pid in match[1].split()]
    started = time.monotonic()
    job.send(signal.SIGKILL)
    for pid in pids:
        wait_gone(pid, deadline=2.0)
    assert time.monotonic() - started < stretched(2.0)
    job.wait_exit()


def test_a_killed_guardian_is_replaced(launch: Launch, worker: Worker) -> None:
    """The launcher notices that its guardian died and starts another, which knows the workers."""
    job = launch("--standalone", worker(PATIENT))
    pid = int(job.wait_line(r"ready (\d+)")[1])
    guardian = _guardian_of(job.pid)
    os.kill(guardian, signal.SIGKILL)
    wait_until(lambda: _guardian_of(job.pid) not in (0, guardian), what="another guardian")
    job.send(signal.SIGKILL)
    wait_gone(pid, deadline=2.0)
    job.wait_exit()


def _guardian_of(launcher: int) -> int:
    for pid in children_of(launcher):
        try:
            if b"guardian of" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            pass
    return 0


def test_the_guardian_does_not_hold_the_output_open(worker: Worker, launch: Launch) -> None:
    """`elastic-run | cat` ends when the job ends."""
    job = launch("--standalone", worker("say('done')"), program=("sh", "-c", '"$0" -m elastic_run "$@" | cat', _PYTHON))
    job.wait_line("done")
    assert job.wait_exit() == 0


def test_ctrl_c_and_job_control_on_a_terminal(terminal: Terminal, worker: Worker) -> None:
    """On a terminal Ctrl-C stops the job once, and the workers get it from the launcher only."""
    process = terminal.start("--standalone", "--nproc-per-node=2", worker(PATIENT))
    terminal.wait_output("rank 0 ready")
    terminal.wait_output("rank 1 ready")
    terminal.type("\x03")
    assert terminal.wait_exit() == 130
    assert bytes(terminal.output).count(b"got SIGINT") == 2
    assert is_gone(process.pid)


def test_read_only_temporary_directory(launch: Launch, worker: Worker) -> None:
    """Without a place for temporary files the job still runs, and reports."""
    job = launch("--standalone", worker("raise ValueError('boom')"), env={"TMPDIR": "/proc/no-such-place"})
    assert job.wait_exit() == 1
    assert "ValueError: boom" in job.stderr


def test_nothing_is_left_in_the_temporary_directory(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Error files go to a temporary directory that is removed, after success, failure and SIGKILL."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    env = {"TMPDIR": str(directory)}
    assert launch("--standalone", worker("say(os.environ['TORCHELASTIC_ERROR_FILE'])"), env=env).wait_exit() == 0
    assert launch("--standalone", worker("sys.exit(1)"), env=env).wait_exit() == 1
    job = launch("--standalone", worker(PATIENT), env=env)
    job.wait_line("ready")
    assert list(directory.iterdir())
    job.send(signal.SIGKILL)
    job.wait_exit()
    wait_until(lambda: not list(directory.iterdir()), deadline=5, what="an empty TMPDIR")


def test_parent_error_file(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A launcher that runs under another one hands the root cause up, in torch's format."""
    file = tmp_path / "parent.json"
    path = worker("raise ValueError('deep inside')")
    assert launch("--standalone", path, env={"TORCHELASTIC_ERROR_FILE": str(file)}).wait_exit() == 1
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: deep inside"
    assert "Traceback" in message["extraInfo"]["py_callstack"]


def test_an_error_file_that_nobody_reads_holds_nobody_up(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A named pipe without a reader kept the launcher from its end, also after SIGTERM."""
    os.mkfifo(tmp_path / "pipe")
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "pipe")}
    assert launch("--standalone", worker("sys.exit(3)"), env=env).wait_exit() == 3


_PYTHON = sys.executable
_ELASTIC_RUN = (_PYTHON, "-m", "elastic_run")


def test_nested_launchers(launch: Launch, worker: Worker) -> None:
    """A launcher inside a worker of a launcher: killed from the outside, nothing of either is left."""
    inner = worker(PATIENT)
    outer = worker(f"""
        subprocess.run([sys.executable, "-m", "elastic_run", "--standalone", "--nproc-per-node=2", {str(inner)!r}])
    """)
    job = launch("--standalone", outer)
    pids = [int(match[1]) for match in job.wait_lines(r"ready (\d+)", count=2)]
    job.send(signal.SIGKILL)
    for pid in pids:
        wait_gone(pid, deadline=2.0)
    job.wait_exit()


def test_as_pid_1_it_reaps_strangers(launch: Launch, worker: Worker) -> None:
    """As PID 1 of a container the launcher collects orphans that are not its own, and still sees its workers end."""
    path = worker("""
        # A grandchild whose parent has ended becomes a child of PID 1: unless that reaps it, it stays in /proc.
        orphan = int(subprocess.run(["sh", "-c", "true & echo $!"], stdout=subprocess.PIPE).stdout)
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{orphan}") and time.monotonic() < deadline: time.sleep(0.01)
        say("reaped", not os.path.exists(f"/proc/{orphan}"), "ppid", os.getppid())
    """)
    job = launch("--standalone", path, program=as_pid_1(_ELASTIC_RUN))
    job.wait_line("reaped True ppid 1")
    assert job.wait_exit() == 0


def test_without_pidfd(launch: Launch, worker: Worker) -> None:
    """Where pidfds are refused exits are seen all the same, and restarts and stops work."""
    code = (
        "import os, sys, runpy; "
        "os.pidfd_open = lambda *_: (_ for _ in ()).throw(OSError(1, 'refused')); "
        "sys.argv = ['elastic_run', *sys.argv[1:]]; runpy.run_module('elastic_run', run_name='__main__')"
    )
    path = worker("subprocess.Popen(['sleep', '1000']); sys.exit(attempt == 0 and rank == 0)")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--kill-background-processes")
    job = launch(*flags, path, program=(_PYTHON, "-c", code))
    assert job.wait_exit() == 0


def test_inside_a_thread_of_somebodys_process(worker: Worker, tmp_path: Path) -> None:
    """elastic_launch works in a thread, installs no handlers there, and leaves no thread or descriptor behind."""
    path = worker("say('ran', rank)")
    program = tmp_path / "host.py"
    program.write_text(f"""
import os, signal, sys, threading
from elastic_run.launcher import LaunchConfig, elastic_launch
config = lambda: LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="local", max_restarts=0)
def run(): results.append(elastic_launch(config(), sys.executable)("-u", {str(path)!r}))
results = []
run()
before = set(os.listdir("/proc/self/fd")), threading.active_count()
handler = signal.getsignal(signal.SIGTERM)
thread = threading.Thread(target=run); thread.start(); thread.join()
after = set(os.listdir("/proc/self/fd")), threading.active_count()
assert results == [{{0: None, 1: None}}] * 2, results
assert before == after, (before, after)
assert signal.getsignal(signal.SIGTERM) is handler
print("fine")
""")
    done = subprocess.run([_PYTHON, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stderr
    assert done.stdout.count("ran") == 4


def test_library_failure_raises(worker: Worker, tmp_path: Path) -> None:
    """A failed job raises ChildFailedError in the program that launched it, with every failure by rank."""
    path = worker("sys.exit(5 if rank == 1 else 0)")
    program = tmp_path / "host.py"
    program.write_text(f"""
import sys
from elastic_run.launcher import LaunchConfig, elastic_launch
from elastic_run.multiprocessing.errors import ChildFailedError
try:
    elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="local", max_restarts=0), sys.executable)("-u", {str(path)!r})
except ChildFailedError as error:
    print({{rank: failure.exitcode for rank, failure in error.failures.items()}})
""")
    done = subprocess.run([_PYTHON, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "{1: 5}", done.stderr


# --- grace periods that are very large, and those that are none -------------------------------------------------------
#: Saves a checkpoint when it is told to stop, which takes until somebody writes to the FIFO.
SAVING = """
def save(number, _):
    say("saving")
    open({gate!r}).read()
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
say("ready")
while True:
    signal.pause()
"""
#: Seconds: more milliseconds than 31 bits hold, more than a float holds.
LONG = ("2700000", "9" * 400)


@pytest.mark.parametrize("given", LONG)
def test_a_long_grace_period_is_kept(launch: Launch, worker: Worker, tmp_path: Path, given: str) -> None:
    """Workers that save a checkpoint are not killed because --shutdown-timeout is very large."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = launch("--standalone", f"--shutdown-timeout={given}", worker(SAVING.format(gate=str(gate))))
    job.wait_line("ready")
    job.send(signal.SIGTERM)
    job.wait_line("saving")
    gate.write_text("")
    assert job.wait_exit() == 143
    assert "saved" in job.stdout


@pytest.mark.parametrize("text", ["inf", "nan", "-1"])
def test_a_grace_period_that_is_none_is_refused(launch: Launch, text: str) -> None:
    """The command names flag and value, and starts nothing."""
    job = launch(f"--shutdown-timeout={text}", "--no-python", sys.executable, "-c", "print('ran')")
    assert job.wait_exit() == 2
    assert "--shutdown-timeout" in job.stderr
    assert "ran" not in job.stdout
