"""The doctor, health checks and exclusions on a real Slurm: one node goes, with its reason; the others go on."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.slurm import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
#: The worker of the first node finds a sick GPU as long as its node is in the job.
SCRIPT = """
import os, sys, time
if os.environ["WORLD_SIZE"] == "3":
    if os.environ["SLURM_NODEID"] == "0":
        sys.exit(int(os.environ.get("SICK_CODE", "0")))
    time.sleep(600 if "SICK_CODE" in os.environ else 0)
os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""
#: The tasks of other nodes go on if one ends; the last line is the exit code of each task's launcher.
STEP = "srun --kill-on-bad-exit=0 --wait=0 bash -c 'elastic-run {flags} train.py; echo ended $SLURM_NODEID with $?'"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes, for all tests here."""
    with slurm_cluster(3) as cluster:
        yield cluster


def run_batch(slurm: SlurmCluster, directory: Path, body: str) -> str:
    """Run a batch script on three nodes to its end, and return what it has written."""
    (directory / "train.py").write_text(SCRIPT, encoding="utf-8")
    script = directory / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = slurm.submit(
        "--output=job.log", "--no-requeue", "--nodes=3", "--ntasks-per-node=1", script, env=env, cwd=directory
    )
    slurm.wait_end(job)
    return (directory / "job.log").read_text(encoding="utf-8")


def read_ends(log: str) -> list[str]:
    """Return each launcher as `NODE with CODE`."""
    return sorted(re.findall(r"ended (\d+ with \d+)", log))


def test_the_doctor_needs_no_arguments_in_a_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun elastic-run doctor` examines all nodes of the step and prints one report."""
    log = run_batch(slurm, tmp_path, "srun elastic-run doctor; echo code $?")
    assert len(re.findall(r"elastic-run doctor on node\d, node\d, node\d\n", log)) == 1, log
    assert "all-reduce of 4 MB" in log, log
    assert log.count("are printed by the doctor on") == 2
    assert log.endswith("code 0\n"), log


def test_an_exit_code_takes_the_first_node_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The node that serves the store ends with 211 and the line for scontrol; the other two train on."""
    step = STEP.format(flags="--nnodes=2:3 --exclude-exit-codes=77")
    log = run_batch(slurm, tmp_path, f"export SICK_CODE=77\n{step}")
    assert read_ends(log) == [f"0 with {contract.EXIT_EXCLUDED}", "1 with 0", "2 with 0"], log
    assert sorted(re.findall(r"trained (\d of 2)", log)) == ["0 of 2", "1 of 2"], log
    assert re.search(r"scontrol update nodename=node\d state=drain reason='elastic-run: exit code 77 is", log), log


def test_a_failed_check_takes_one_node_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A node of the step that is unhealthy from the beginning ends with 210; the others begin without it."""
    others_wait = "until grep -q 'waiting: 2/3' job.log; do sleep 0.1; done"
    check = f"#!/bin/sh\ntest $SLURM_NODEID = 1 || exit 0\n{others_wait}\necho GPU 3 is lost; exit 1\n"
    (tmp_path / "check").write_text(check, encoding="utf-8")
    (tmp_path / "check").chmod(0o755)
    step = STEP.format(flags="--nnodes=2:3 --rdzv-conf=last_call_timeout=16 --health-check=./check")
    log = run_batch(slurm, tmp_path, step)
    assert read_ends(log) == ["0 with 0", f"1 with {contract.EXIT_UNHEALTHY}", "2 with 0"], log
    assert sorted(re.findall(r"trained (\d of 2)", log)) == ["0 of 2", "1 of 2"], log
    assert "unhealthy: the health check ended with exit code 1: GPU 3 is lost" in log, log
