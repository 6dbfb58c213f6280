"""Four nodes of a real Slurm: the shortest script with two workers on each, the time limit, and --signal before it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.slurm import KILL_WAIT, SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
#: Seconds for a job with a limit of one minute. Slurm looks at limits every half minute.
MINUTES = 180.0
#: Says which worker of which node it is, and where all of them meet.
SAYS = """
import os
told = "{RANK} is {LOCAL_RANK} of {LOCAL_WORLD_SIZE} on {SLURMD_NODENAME}, {WORLD_SIZE} meet at {MASTER_ADDR}\\n"
os.write(1, told.format(**os.environ).encode())
"""
#: Trains until a signal comes, says which, and ends well.
HEARS = """
import os, signal, sys
def hear(number, _):
    os.write(1, f"heard {signal.Signals(number).name} {os.environ['RANK']}\\n".encode())
    sys.exit()
signal.signal(signal.SIGUSR1, hear)
signal.signal(signal.SIGTERM, hear)
os.write(1, f"trains {os.environ['RANK']}\\n".encode())
while True:
    signal.pause()
"""
#: A batch script that srun does not replace, with a handler of its own. bash's wait ends at each signal.
TRAPS = """
trap 'echo script heard; touch heard' USR1
srun elastic-run --nproc-per-node=2 train.py &
while kill -0 $! 2>/dev/null; do wait $!; test ! -e heard || scancel --signal=TERM $SLURM_JOB_ID; done
"""
#: Two device files of GPUs on a host, in a /dev of its own.
TWO_GPUS = """
mount -t tmpfs dev "$1" && cd "$1" && touch nvidiactl nvidia0 nvidia1
for name in null zero full random urandom tty; do touch $name && mount --bind /dev/$name $name; done
mkdir shm pts && mount --rbind /dev/shm shm && mount --rbind /dev/pts pts
ln -s /proc/self/fd . && ln -s pts/ptmx . && mount --move . /dev
"""


class Limited(NamedTuple):
    """A job with a limit of one minute.

    Attributes:
        option: Of sbatch.
        body: The batch script.
        state: Its end, in Slurm's words.
        signal: The signal that its workers handle.
    """

    option: str
    body: str
    state: str
    signal: str


STEP = "srun elastic-run --nproc-per-node=2 train.py"
LIMITED = {
    "limit": Limited("--comment=none", f"exec {STEP}", "TIMEOUT", "SIGTERM"),
    "steps": Limited("--signal=USR1@10", STEP, "COMPLETED", "SIGUSR1"),
    "steps-exec": Limited("--signal=USR1@10", f"exec {STEP}", "COMPLETED", "SIGUSR1"),
    "script-exec": Limited("--signal=B:USR1@10", f"exec {STEP}", "COMPLETED", "SIGUSR1"),
    "script": Limited("--signal=B:USR1@10", TRAPS, "COMPLETED", "SIGTERM"),
}


def submit(slurm: SlurmCluster, directory: Path, body: str, *options: str, path: str = "") -> int:
    """Submit a batch script, with one launcher on each node."""
    script = directory / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    options = ("--output=job.log", "--no-requeue", "--ntasks-per-node=1", *options)
    return slurm.submit(*options, script, env=env, cwd=directory)


def find_programs(slurm: SlurmCluster) -> list[str]:
    """Return the command lines of what runs on the nodes, Slurm's own processes left out."""
    found = []
    for pid in slurm.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words and not words.startswith("slurmstepd"):
            found.append(words)
    return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of four nodes."""
    with slurm_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def limited(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """Submit all jobs with a limit at the same time, and return the number and the log of each."""
    jobs = {}
    for name, one in LIMITED.items():
        directory = tmp_path_factory.mktemp(name)
        (directory / "train.py").write_text(HEARS, encoding="utf-8")
        number = submit(slurm, directory, one.body, "--nodes=2", "--cpus-per-task=1", "--time=1", one.option)
        jobs[name] = (number, directory / "job.log")
    return jobs


def test_the_shortest_script_has_a_worker_for_each_gpu_of_four_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun elastic-run train.py`, without a flag, on four nodes with two GPUs each is one job of eight ranks."""
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.13.0'\ncuda = '12.8'\n", encoding="ascii")
    for host in slurm.hosts:
        (tmp_path / host.name).mkdir()
        host.run("sh", "-ec", TWO_GPUS, "sh", tmp_path / host.name)
    (tmp_path / "train.py").write_text(SAYS, encoding="utf-8")
    job = submit(slurm, tmp_path, "exec srun elastic-run train.py", "--nodes=4", path=str(package.parent))
    ending = slurm.wait_end(job)
    log = (tmp_path / "job.log").read_text(encoding="utf-8")
    assert ending.state == "COMPLETED", log
    first = slurm.hosts[0]
    expected = [f"{rank} is {rank % 2} of 2 on node{rank // 2}, 8" for rank in range(8)]
    assert sorted(re.findall("^(.*) meet at ", log, re.MULTILINE)) == expected, log
    (place,) = set(re.findall(" meet at (.*)", log))
    assert place in {first.name, first.address, first.address6}


@pytest.mark.parametrize("name", LIMITED)
def test_workers_hear_of_the_time_limit(slurm: SlurmCluster, limited: dict[str, tuple[int, Path]], name: str) -> None:
    """Slurm's own timer: at the limit SIGTERM, before it the signal of --signal, where docs/slurm.md says so."""
    (number, path), one = limited[name], LIMITED[name]
    ending = slurm.wait_end(number, deadline=MINUTES)
    slurm.wait_cleared(number)
    log = path.read_text(encoding="utf-8")
    assert ending.state == one.state, log
    assert sorted(re.findall(r"trains (\d)", log)) == ["0", "1", "2", "3"], log
    # With linuxproc Slurm signals the workers, too; each ends at the first signal.
    assert sorted(re.findall(r"heard (\w+) (\d)", log)) == [(one.signal, str(rank)) for rank in range(4)], log
    assert ("script heard" in log) == (name == "script"), log


def test_no_job_stays_in_completing(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job of four nodes is cancelled: no process is left, and Slurm calls it gone before it would have to kill."""
    (tmp_path / "train.py").write_text(HEARS, encoding="utf-8")
    job = submit(slurm, tmp_path, STEP, "--nodes=4")
    log = tmp_path / "job.log"
    wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").count("trains") == 8, what="the workers run")
    slurm.cancel(job)
    wait_until(lambda: not slurm.run("squeue", "-h", "-j", str(job)), deadline=KILL_WAIT / 2, what="the job gone")
    assert find_programs(slurm) == []
