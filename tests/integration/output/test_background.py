"""Processes that workers leave in the background: they live on after a success, and after nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.processes import is_gone, kill_processes, wait_gone
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker


#: Leaves an upload in the background, which goes on when somebody writes to the gate, and says so on stderr.
_UPLOADS = """
upload = "trap '' TERM; read line < {gate}; echo uploaded >&2; echo $? > {done}"
started = subprocess.Popen(["sh", "-c", upload, "upload"], start_new_session={session})
say("upload", started.pid)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Make the FIFO that background processes wait at; one that still waits is let through at the end."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield path
    with contextlib.suppress(OSError):  # nobody waits there
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def _uploads(gate: Path, tmp_path: Path, rest: str = "", *, session: bool = True) -> str:
    return _UPLOADS.format(gate=gate, done=tmp_path / "done", session=session) + rest


def _wait_done(tmp_path: Path) -> str:
    done = tmp_path / "done"
    wait_until(lambda: done.exists() and bool(done.read_text()), what="the end of the upload")
    return done.read_text()


@pytest.mark.parametrize("session", [True, False])
def test_an_upload_goes_on_after_a_success(
    launch: Launch,
    worker: Worker,
    tmp_path: Path,
    gate: Path,
    session: bool,
) -> None:
    """A stubborn background process delays no success, is named, and what it writes to stderr still comes through."""
    job = launch("--standalone", "--shutdown-timeout=600", worker(_uploads(gate, tmp_path, session=session)))
    pid = int(job.wait_line(r"upload (\d+)")[1])
    assert job.process.wait(60) == 0
    job.wait_line(rf"1 background process of the workers keeps running: pid {pid} \(sh -c trap")
    assert not is_gone(pid)
    gate.write_text("go\n")
    assert _wait_done(tmp_path) == "0\n"
    wait_gone(pid)
    assert job.wait_exit() == 0  # nobody holds the output open any more
    assert "uploaded" in job.stderr


def test_it_goes_on_in_log_files_and_under_a_prefix(launch: Launch, worker: Worker, tmp_path: Path, gate: Path) -> None:
    """What it writes to a stream that is tee'd is in the log file and on the console."""
    job = launch("--standalone", "--tee=3", f"--log-dir={tmp_path / 'logs'}", worker(_uploads(gate, tmp_path)))
    job.wait_line("keeps running")
    assert job.process.wait(60) == 0
    gate.write_text("go\n")
    assert _wait_done(tmp_path) == "0\n"
    assert job.wait_exit() == 0
    assert "uploaded" in job.stderr
    assert [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")] == ["uploaded\n"]


def test_a_lock_of_the_launcher_is_free_after_the_job(
    launch: Launch, worker: Worker, tmp_path: Path, gate: Path
) -> None:
    """What passes the output on holds no other file that the launcher has inherited, such as that of `flock`."""
    path = tmp_path / "lock"
    locks = ("sh", "-c", 'exec 3> "$0"; flock 3; exec "$@"', str(path), *ELASTIC_RUN)
    job = launch("--standalone", worker(_uploads(gate, tmp_path)), program=locks)
    job.wait_line("keeps running")
    assert job.process.wait(60) == 0
    subprocess.run(["flock", "--timeout=30", path, "true"], check=True)
    gate.write_text("go\n")
    assert _wait_done(tmp_path) == "0\n"


def test_inside_a_program(worker: Worker, tmp_path: Path, gate: Path) -> None:
    """A job that a program launches leaves it alone as well, and no zombie behind."""
    host = tmp_path / "host.py"
    host.write_text(
        "import os, sys\n"
        "from elastic_run.launcher import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(1, 1, 1, rdzv_backend='local', max_restarts=0)\n"
        f"elastic_launch(config, sys.executable)({str(worker(_uploads(gate, tmp_path)))!r})\n"
        "try: print('child', os.waitpid(-1, os.WNOHANG), flush=True)\n"
        "except ChildProcessError: print('no child', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, host], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.wait(60) == 0
        gate.write_text("go\n")
        assert _wait_done(tmp_path) == "0\n"
        out, err = program.communicate(timeout=60)
    assert "no child" in out
    assert "uploaded" in err


def test_helpers_that_end_with_their_worker_are_not_named(launch: Launch, worker: Worker) -> None:
    """A process that ends a moment after its worker is waited for, and nobody hears of it."""
    job = launch("--standalone", worker("subprocess.Popen(['sleep', '0.1'])"))
    assert job.wait_exit() == 0
    assert "background" not in job.stderr


@pytest.mark.parametrize(
    ("end", "code", "flags"),
    [
        ("sys.exit(7)", 7, ()),
        ("sys.exit(0 if rank else 7)", 7, ("--nproc-per-node=2",)),
        ("sys.exit(attempt == 0 and 7)", 0, ("--max-restarts=1", "--kill-background-processes")),
    ],
)
def test_nothing_lives_on_after_a_failure(
    launch: Launch, worker: Worker, tmp_path: Path, gate: Path, end: str, code: int, flags: tuple[str, ...]
) -> None:
    """After a failure, a restart, or where the user wants it, background processes end with the job."""
    job = launch("--standalone", "--shutdown-timeout=1", *flags, worker(_uploads(gate, tmp_path, end)))
    assert job.wait_exit() == code
    pids = [int(pid) for pid in re.findall(r"upload (\d+)", job.stdout)]
    assert pids
    assert all(map(is_gone, pids))


def test_a_launcher_that_is_killed_after_the_success(
    launch: Launch, worker: Worker, tmp_path: Path, gate: Path
) -> None:
    """Once the job has succeeded the guardian lets the background processes live, whatever becomes of the launcher."""
    code = (
        "import os, runpy, signal, sys\n"
        "from elastic_run.multiprocessing.guardian import Guardian\n"
        "Guardian.close = lambda self, **_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.argv = ['elastic_run', *sys.argv[1:]]; runpy.run_module('elastic_run', run_name='__main__')"
    )
    path = worker(_uploads(gate, tmp_path))
    job = launch("--standalone", path, program=(sys.executable, "-c", code))
    pid = int(job.wait_line(r"upload (\d+)")[1])
    assert job.process.wait(60) == -signal.SIGKILL
    gate.write_text("go\n")
    assert _wait_done(tmp_path) == "0\n"
    wait_gone(pid)
    job.wait_exit()


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_whole_job_decides(
    launch: Launch,
    worker: Worker,
    tmp_path: Path,
    gate: Path,
    is_failing: bool,
) -> None:
    """On a node whose own workers are done background processes live until the others are, and on if these succeed."""
    other = tmp_path / "other"
    os.mkfifo(other)
    end = 7 if is_failing else 0
    path = worker(
        f"if os.environ['GROUP_RANK'] == '1':\n"
        f"    open({str(other)!r}).read()\n"
        f"    sys.exit({end})\n" + _uploads(gate, tmp_path)
    )
    port = free_port()
    flags = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--shutdown-timeout=1")
    jobs = [launch(*flags, "--rdzv-id=job", path) for _ in range(2)]
    found = wait_until(
        lambda: re.search(r"upload (\d+)\n", "".join(job.stdout for job in jobs)), deadline=60, what="an upload"
    )
    assert found is not None
    pid = int(found[1])
    with other.open("w"):
        pass
    assert [job.process.wait(60) for job in jobs] == [end, end]
    assert is_gone(pid) == is_failing
    kill_processes([pid])
    for job in jobs:
        job.wait_exit()
