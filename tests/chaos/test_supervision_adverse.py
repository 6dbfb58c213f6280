"""The running launcher where something works against it: hostile workers, hosts that fork, stuck readers, defects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import catches, processes_with_environment, wait_gone, wait_guardians
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


#: Ignores SIGTERM. (Two dollar signs are one after the launcher's macros, as under torchrun.)
DEAF = "trap '' TERM; echo ready $$$$; while :; do sleep 1000; done"
_HOST = "from elastic_run.launcher import LaunchConfig, elastic_launch\nimport os, signal, sys, time\n"


def _host(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "host.py"
    path.write_text(_HOST + body)
    return path


def _run_until_killed(host: Path) -> str:
    """Run a program that kills itself; return what it, and what it left behind, wrote."""
    done = subprocess.run([sys.executable, host], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    return done.stdout


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_without_our_environment_is_killed_all_the_same(launch: Launch) -> None:
    """A deaf worker that dropped the environment ends with the grace period."""
    job = launch("--standalone", "--shutdown-timeout=1", "--no-python", "env", "-i", "sh", "-c", DEAF)
    pid = int(job.wait_line(r"ready (\d+)")[1])
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    wait_gone(pid, deadline=0.5)


def test_a_worker_without_our_environment_dies_with_the_launcher(launch: Launch) -> None:
    """The guardian knows it by its session, of which the launcher tells it right after the start."""
    job = launch("--standalone", "--no-python", "env", "-i", "sh", "-c", DEAF)
    pid = int(job.wait_line(r"ready (\d+)")[1])
    wait_guardians(job.pid)
    job.send(signal.SIGKILL)
    wait_gone(pid, deadline=2.0)
    job.wait_exit()


def test_a_worker_that_the_guardian_was_not_told_of_yet_dies_too(tmp_path: Path) -> None:
    """A launcher that is killed right after a start leaves a worker that is known by its environment only."""
    host = tmp_path / "host.py"
    host.write_text(
        "import os, signal\n"
        "from elastic_run.multiprocessing.fork_exec import start_process\n"
        "from elastic_run.multiprocessing.guardian import Guardian\n"
        "guardian = Guardian(is_exec=False)\n"
        "guardian.start()\n"
        "reading, writing = os.pipe()\n"
        "env = {'ELASTIC_RUN_TOKEN': guardian.worker_token}\n"
        "pid = start_process(['/bin/sh', '-c', 'echo ready >&2; exec sleep 600'], env, stdout=1, stderr=writing)\n"
        "os.read(reading, 6)\n"
        "print(pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        encoding="utf-8",
    )
    wait_gone(int(_run_until_killed(host)), deadline=2.0)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_function_that_the_guardian_was_not_told_of_is_never_called(method: str, tmp_path: Path) -> None:
    """Where the program is killed right after it has started a process, that ends by itself."""
    host = tmp_path / "host.py"
    host.write_text(
        "import os, signal, time\n"
        "from elastic_run.launcher import LaunchConfig, elastic_launch\n"
        "from elastic_run.multiprocessing.guardian import Guardian\n"
        "def work():\n"
        "    os.write(1, b'called')\n"
        "    time.sleep(600)\n"
        "def die(_, session, born):\n"
        "    os.write(1, b'%d\\n' % session)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    Guardian.watch = die\n"
        f"    config = LaunchConfig(1, 1, 1, rdzv_backend='local', start_method={method!r}, max_restarts=0)\n"
        "    elastic_launch(config, work)()\n",
        encoding="utf-8",
    )
    # And "called" doesn't stand behind the number.
    wait_gone(int(_run_until_killed(host)), deadline=2.0)


def test_a_guardian_leaves_the_launcher_s_group_before_anything_starts(tmp_path: Path) -> None:
    """SIGKILL to the launcher's whole process group, at whatever moment, doesn't take the guardian along."""
    host = tmp_path / "host.py"
    host.write_text(
        "import os, time\n"
        "from elastic_run.multiprocessing.guardian import Guardian\n"
        "begin_session = os.setsid\n"
        "def begin_slowly():\n"
        "    time.sleep(0.3)\n"
        "    begin_session()\n"
        "os.setsid = begin_slowly\n"
        "guardian = Guardian(is_exec=False)\n"
        "pid = guardian.start()\n"
        "print(os.getpgid(pid) == pid)\n"
        "guardian.let_go(is_over=True)\n"
        "os.waitpid(pid, 0)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, host], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_launcher_that_is_killed_while_its_guardian_starts_leaves_no_directory(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """The guardian removes the launcher's temporary directory also where that dies before it hears of the guardian."""
    kill = (
        "import os, signal; begin_session = os.setsid; "
        "os.setsid = lambda: (os.kill(os.getppid(), signal.SIGKILL), begin_session()); "
        "from elastic_run.__main__ import main; main()"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (sys.executable, "-c", kill)
    job = launch(worker("say('begun')"), program=program, env={"TMPDIR": str(temporary)})
    assert job.wait_exit() == -signal.SIGKILL
    wait_until(lambda: not list(temporary.iterdir()))
    assert job.stdout == ""


def test_a_stop_signal_comes_once(launch: Launch, worker: Worker) -> None:
    """A worker that takes long to save is not told again when its group is."""
    path = worker("""
        signal.signal(signal.SIGTERM, lambda *_: say("told"))
        say("ready")
        while True: signal.pause()
    """)
    job = launch("--standalone", "--shutdown-timeout=2", path)
    job.wait_line("ready")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert job.stdout.count("told") == 1


def test_a_stuck_reader_does_not_hold_a_stopped_launcher(worker: Worker, tmp_path: Path) -> None:
    """After SIGTERM the launcher goes although nobody reads its output."""
    path = worker("say('x' * 4_000_000)")
    started = tmp_path / "started"
    path.write_text(path.read_text().replace("say('x'", f"open({str(started)!r}, 'w').close(); say('x'"))
    reader, writer = os.pipe()
    command = [
        sys.executable,
        "-m",
        "elastic_run",
        "--standalone",
        "--tee=3",
        f"--log-dir={tmp_path / 'logs'}",
        str(path),
    ]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL, start_new_session=True)
    os.close(writer)
    try:
        wait_until(started.exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, 143)
    finally:
        process.kill()
        process.wait(20)
        os.close(reader)


def test_a_fork_of_the_host_does_not_blind_the_guardian(worker: Worker, tmp_path: Path) -> None:
    """A child that the host forked keeps the pipe open; the workers die with the host all the same."""
    path = worker("say('pid', os.getpid())\nwhile True: signal.pause()")
    host = _host(
        tmp_path,
        f"""
import threading
def fork_later():
    child = os.fork()
    if child == 0:
        signal.pause()
    print("forked", child, flush=True)
threading.Timer(0.5, fork_later).start()
elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="local", max_restarts=0), sys.executable)("-u", {str(path)!r})
""",
    )
    process = subprocess.Popen([sys.executable, "-W", "ignore", host], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        lines = dict(_two_words(process.stdout.readline()) for _ in range(2))
        process.kill()
        process.wait(20)
        wait_gone(int(lines["pid"]), deadline=2.0)
        os.kill(int(lines["forked"]), signal.SIGKILL)


def _two_words(line: str) -> tuple[str, str]:
    first, _, rest = line.strip().partition(" ")
    return first, rest


def test_a_defect_of_ours_stops_the_workers_with_grace(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """An error inside the loop raises in the host, and no worker is left, restarted or killed without being told."""
    path = worker("""
        signal.signal(signal.SIGTERM, lambda *_: (say("told"), sys.exit(0)))
        say("ready")
        while True: signal.pause()
    """)
    host = _host(
        tmp_path,
        f"""
from elastic_run.agent.driver.supervisor import Supervisor
def broken(self, number): raise RuntimeError("defect")
Supervisor._on_resize = broken
try:
    elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="local", max_restarts=3), sys.executable)("-u", {str(path)!r})
except RuntimeError as error:
    print("raised", error)
""",
    )
    job = launch(program=(sys.executable, str(host)))
    job.wait_lines("ready", count=2)
    job.send(signal.SIGWINCH)
    job.wait_exit()
    assert "raised defect" in job.stdout, job.stderr
    assert job.stdout.count("told") == 2
    assert job.stdout.count("ready") == 2


def test_an_interrupt_that_is_the_hosts_own_gives_workers_their_grace(launch: Launch, worker: Worker) -> None:
    """Where SIGINT is not among the signals to handle, it interrupts the program, and workers are asked to stop."""
    path = worker("""
        signal.signal(signal.SIGINT, lambda *_: (say("saved"), sys.exit(0)))
        say("ready")
        while True: signal.pause()
    """)
    host = _host(
        path.parent,
        f"""
try:
    config = LaunchConfig(1, 1, 1, rdzv_backend="local", max_restarts=0, signals_to_handle="SIGTERM")
    elastic_launch(config, sys.executable)("-u", {str(path)!r})
except KeyboardInterrupt:
    print("interrupted")
""",
    )
    job = launch(program=(sys.executable, str(host)))
    job.wait_line("ready")
    job.send(signal.SIGINT)
    assert job.wait_exit() == 0
    assert "saved" in job.stdout
    assert "interrupted" in job.stdout


def test_failures_that_the_launcher_saw_late_are_failures(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Workers that failed while the launcher was stopped are not reported as stopped by it."""
    path = worker("""
        say("ready", os.getpid())
        sys.stdin.readline()
        raise ValueError("mine")
    """)
    reader, writer = os.pipe()
    job = launch("--standalone", "--nproc-per-node=3", f"--log-dir={tmp_path / 'logs'}", path, stdin=reader)
    pids = [int(match[1]) for match in job.wait_lines(r"ready (\d+)", count=3)]
    job.send(signal.SIGSTOP)
    wait_until(lambda: _state(job.pid) == "T")
    os.write(writer, b"\n" * 30_000)  # each worker reads ahead: enough for all
    os.close(writer)
    os.close(reader)
    wait_until(lambda: all(_state(pid) == "Z" for pid in pids))
    job.send(signal.SIGCONT)
    assert job.wait_exit() == 1
    (found,) = (tmp_path / "logs").glob("*_*/failure.json")
    workers = json.loads(found.read_text())["workers"]
    assert [worker["was_stopped"] for worker in workers] == [False] * 3


def test_a_guardian_that_cannot_live_is_given_up(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Where no guardian can run the job does all the same, and says so once."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = worker(f"open({str(gate)!r}).close()")
    broken = tmp_path / "python3"  # by its name an interpreter, and executed as one
    broken.write_text("#!/bin/sh\n")
    broken.chmod(0o755)
    host = _host(
        tmp_path,
        f"""
from elastic_run.multiprocessing import guardian
guardian._FIRST_PAUSE /= 5
guardian.running_interpreter = lambda: {str(broken)!r}
elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="local", max_restarts=0), sys.executable)("-u", {str(path)!r})
print("done")
""",
    )
    job = launch(program=(sys.executable, str(host)))
    job.wait_line("each guardian process was killed")  # after all pauses between guardians
    gate.open("w").close()
    assert job.wait_exit() == 0
    assert job.stdout.strip() == "done"
    assert len(job.stderr.splitlines()) == 2, job.stderr


def test_an_interrupt_at_the_very_start_is_quiet(launch: Launch, worker: Worker) -> None:
    """Ctrl-C while the launcher still imports ends it without a traceback."""
    path = worker("say('ready')\nwhile True: signal.pause()")
    for delay in (0, 1, 2, 4):
        job = launch("--standalone", path)
        # Before its handlers stand it is Python itself that starts, and answers.
        wait_until(lambda pid=job.pid: catches(pid, signal.SIGTERM))  # type: ignore[misc]
        for _ in range(delay * 40):
            processes_with_environment("no-such-token")  # some work, so that the signal comes at various moments
            if job.stdout:
                break
        job.send(signal.SIGINT)
        assert job.wait_exit() in (-signal.SIGINT, 130)
        assert "elastic_run/" not in job.stderr  # a worker may have a traceback of its own
