"""--hosts: one command starts a job on several machines through real ssh, and ends with it."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.processes import children_of, is_gone
from tests.support.ssh import ssh_hosts
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import HostProcess
    from tests.support.launch import Worker
    from tests.support.ssh import SshHosts

THERE = "subprocess.Popen(['sleep', '1000'])\nsay('there')\nsignal.pause()"


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[SshHosts]:
    """Boot three hosts with sshd."""
    with ssh_hosts(3, tmp_path) as hosts:
        yield hosts


def test_one_command_runs_a_job_on_all_hosts(ssh: SshHosts, worker: Worker) -> None:
    """Ranks are in the order of the list, lines have the host's name, and what goes along arrives as it was given."""
    path = worker(
        "import json, socket\n"
        "env = [os.environ.get(name) for name in ('NCCL_X', 'OWN', 'OTHER', 'ELASTIC_RUN_RDZV_TOKEN')]\n"
        "say(rank, socket.gethostname(), json.dumps([os.getcwd(), sys.executable, sys.argv[1:], env]))\n"
        "os.write(2, b'no end' if rank == 0 else b'')\n"
    )
    words = ["a b", "it's", "$HOME", "--hosts=x", ""]
    env = {"NCCL_X": "1", "OWN": "2", "OTHER": "3", "PET_HOSTS": "nowhere"}
    job = ssh.start("--hosts-env=OWN", path, *words, hosts="h2,h1:2,root@h0", env=env)
    assert job.wait_exit() == 0, job.stderr
    rest = json.dumps([str(ssh.directory), sys.executable, words, ["1", "2", None, None]])
    places = ["[h0] 3 h0", "[h1] 1 h1", "[h1] 2 h1", "[h2] 0 h2"]
    assert sorted(job.stdout.splitlines()) == [f"{place} {rest}" for place in places]
    assert "[h2] no end\n" in job.stderr


def test_a_failure_on_one_host_is_told_once(ssh: SshHosts, worker: Worker) -> None:
    """All hosts end with the code of the worker that failed, and the user gets one whole report."""
    job = ssh.start(worker("if rank == 1:\n    sys.exit(7)\nsignal.pause()"))
    assert job.wait_exit() == 7
    assert job.stderr.count("exit code 7 --") == 1
    assert "rank 1 on h1" in job.stderr
    ssh.wait_empty(5)


def test_the_token_is_in_no_command_line(ssh: SshHosts, worker: Worker) -> None:
    """`ps` shows the token neither here nor on the hosts."""
    job = ssh.start(worker(THERE), env={"ELASTIC_RUN_RDZV_TOKEN": "0123456789abcdef-secret"})
    job.wait_lines("there", count=3)
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert sum("elastic_run.hosts.remote" in line for line in lines) >= 6  # ssh and its other side
    assert not any("0123456789abcdef" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_hosts(ssh: SshHosts, worker: Worker, number: signal.Signals) -> None:
    """The workers of all hosts get the time to save, and the command ends as a launcher does.

    A host that hears of the signal first stops the others, whose workers may get SIGTERM in its place.
    """
    path = worker(
        "def stop(*_):\n    say('saved')\n    sys.exit(0)\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)\n"
        "say('there')\nwhile True:\n    signal.pause()"
    )
    job = ssh.start(path)
    job.wait_lines("there", count=3)
    job.send(number)
    assert job.wait_exit() == 128 + number
    assert job.stdout.count("saved") == 3
    ssh.wait_empty(5)


# --- hosts that are not ready -----------------------------------------------------------------------------------------
def test_a_host_that_cannot_be_reached(ssh: SshHosts, worker: Worker, tmp_path: Path) -> None:
    """It is named with ssh's words, and nothing has started on the others."""
    job = ssh.start(worker(f"open({str(tmp_path / 'started')!r}, 'w')"), hosts="h0,hub,h1")
    assert job.wait_exit() == 201
    words = "hub: ssh: connect to host hub port 22: Connection refused"
    assert job.stderr == f"elastic-run: error: {words}; nothing was started\n"
    ssh.wait_empty(5)
    assert not (tmp_path / "started").exists()


def test_a_host_that_lacks_something(ssh: SshHosts) -> None:
    """A script, a directory or an interpreter that a host does not have is named with the host, exit code 2."""
    (ssh.directory / "worker.py").touch()
    for hidden, words in (
        (ssh.directory, "script 'worker.py' does not exist"),
        (ssh.directory.parent, f"directory {str(ssh.directory)!r}: no such file or directory"),
        (Path(sys.executable).parent, f"{sys.executable}: not found"),
    ):
        ssh.hosts[1].run("mount", "-t", "tmpfs", "none", hidden)
        job = ssh.start("worker.py")
        assert job.wait_exit() == 2
        (line,) = job.stderr.splitlines()
        assert line.startswith("elastic-run: error: h1: ")
        assert words in line


def test_ctrl_c_before_the_start(ssh: SshHosts, worker: Worker) -> None:
    """While a host does not answer, Ctrl-C ends the command and what has begun on the others."""
    ssh.hosts[2].go_dark()
    job = ssh.start(worker(THERE))
    wait_until(lambda: len(children_of(job.pid)) == 3)
    job.send(signal.SIGINT)
    assert job.wait_exit() == 130
    ssh.wait_empty(5)


# --- the end of a connection ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_nothing_outlives_the_command(ssh: SshHosts, worker: Worker, times: int) -> None:
    """After kill -9 of the command nothing is left on any host within 5 s, nor an ssh."""
    for _ in range(times):
        job = ssh.start(worker(THERE))
        job.wait_lines("there", count=3)
        clients = children_of(job.pid)
        job.kill()
        ssh.wait_empty(5)
        for client in clients:
            wait_until(functools.partial(is_gone, client), deadline=5)


def test_a_host_whose_connection_ends_is_lost(ssh: SshHosts, worker: Worker) -> None:
    """Its node ends at once; the job that needs it ends on the other hosts too, with the code of lost nodes."""
    job = ssh.start(worker(THERE))
    job.wait_lines("there", count=3)
    os.kill(ssh_of(job, "h1"), signal.SIGKILL)
    job.wait_line("the connection to h1 is lost: ssh has ended with 137")
    assert job.wait_exit() == 206
    assert "the job needs 3 hosts, so elastic-run stops it on h0, h2" in job.stderr
    ssh.wait_empty(5)


def test_an_elastic_job_outlives_a_host(ssh: SshHosts, worker: Worker) -> None:
    """With a minimum of two, the others go on without the host that coordinated."""
    job = ssh.start("--nnodes=2:3", worker("say(size := os.environ['WORLD_SIZE'])\nif size == '3': signal.pause()"))
    job.wait_lines(r"\] 3", count=3)
    os.kill(ssh_of(job, "h0"), signal.SIGKILL)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("] 2\n") == 2


def ssh_of(job: HostProcess, host: str) -> int:
    """Return the ssh process of a host."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(job.pid)}
    (found,) = [pid for pid, each in words.items() if host.encode() in each]
    return found
