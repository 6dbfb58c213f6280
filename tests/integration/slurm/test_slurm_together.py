"""On a real Slurm: two jobs at once on the same nodes, and a long checkpoint when a job is cancelled or preempted."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
#: Ends when the workers of the other job run too.
TOGETHER = """
import os, pathlib, time
job = os.environ["SLURM_JOB_ID"]
os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
pathlib.Path(f"runs-{job}-{os.environ['RANK']}").touch()
while len(list(pathlib.Path().glob("runs-*"))) < 4:
    time.sleep(0.05)
"""
#: Saves for 20 s once it is told to stop.
SAVES = """
import os, signal, time
def save(*_):
    time.sleep(20)
    os.write(1, b"saved {RANK}\\n".replace(b"{RANK}", os.environ["RANK"].encode()))
    raise SystemExit
signal.signal(signal.SIGTERM, save)
os.write(1, b"training\\n")
signal.pause()
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes with the grace that Slurm has by default, and a partition for urgent jobs."""
    with slurm_cluster(2, kill_wait=30, grace=30) as cluster:
        yield cluster


def submit(slurm: SlurmCluster, directory: Path, step: str, log: str, *more: str) -> int:
    """Submit a batch script of two nodes that runs a step."""
    script = directory / "job.sbatch"
    script.write_text(f"#!/bin/bash\nexec {step}\n", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": str(ROOT)}
    options = (f"--output={log}", "--no-requeue", "--nodes=2", "--ntasks-per-node=1", *more)
    return slurm.submit(*options, script, env=env, cwd=directory)


def test_two_jobs_at_once_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two jobs of the shortest script on the same two nodes train two ranks each, at the same time."""
    (tmp_path / "train.py").write_text(TOGETHER, encoding="utf-8")
    logs = ("first.log", "second.log")
    jobs = [submit(slurm, tmp_path, "srun elastic-run train.py", log) for log in logs]
    assert [slurm.wait_end(job).exit_code for job in jobs] == [0, 0]
    for log in logs:
        text = (tmp_path / log).read_text(encoding="utf-8")
        assert sorted(re.findall(r"trained (\d of \d)", text)) == ["0 of 2", "1 of 2"], text


@pytest.mark.parametrize("is_preempted", [False, True], ids=["scancel", "preemption"])
def test_a_checkpoint_of_20_seconds_completes(slurm: SlurmCluster, tmp_path: Path, *, is_preempted: bool) -> None:
    """The workers save for 20 s, inside --shutdown-timeout and Slurm's 30 s, and nothing is left on the nodes."""
    (tmp_path / "train.py").write_text(SAVES, encoding="utf-8")
    log = tmp_path / "job.log"
    job = submit(slurm, tmp_path, "srun elastic-run --shutdown-timeout=27 train.py", log.name, "--exclusive")
    wait_until(lambda: log.exists() and log.read_text().count("training\n") == 2, what="the workers run")
    if is_preempted:
        urgent = submit(slurm, tmp_path, "srun true", "urgent.log", "--exclusive", "--partition=urgent")
        assert slurm.wait_end(urgent).state == "COMPLETED"
    else:
        slurm.cancel(job)
    slurm.wait_end(job)
    slurm.wait_cleared(job)
    text = log.read_text(encoding="utf-8")
    assert sorted(re.findall(r"saved (\d)", text)) == ["0", "1"], text
    assert slurm.processes() == []
