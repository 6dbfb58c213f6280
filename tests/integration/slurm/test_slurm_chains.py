"""Time limits, chains, containers and switches on a real Slurm. Release 22.05 does not tell when a job ends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.slurm.test_slurm import ENDLESS, LIFE, Submitted
from tests.integration.slurm.test_slurm_steps import run_batch, trained
from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

#: Says on which node each rank ran.
PLACES = """
import os
os.write(1, "trained {RANK} of {WORLD_SIZE} on {SLURMD_NODENAME}\\n".format(**os.environ).encode())
"""
#: Trains until it is asked to stop, and saves for longer than Slurm would wait.
SAVES = """
import os, time
from elastic_run.worker import stop_requested
stop_requested()
os.write(1, b"training\\n")
while not stop_requested():
    time.sleep(0.05)
os.write(1, b"asked\\n")
time.sleep(12)
os.write(1, b"saved\\n")
"""
#: Tells when the job ends, in so many seconds, where Slurm does not: newer releases tell each step.
TELL_END = "export SLURM_JOB_END_TIME=${{SLURM_JOB_END_TIME:-$(($(date +%s) + {seconds}))}}\n"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes at two switches."""
    with slurm_cluster(3, switches=["node[0,2]", "node1"]) as cluster:
        yield cluster


def test_ranks_follow_the_switches(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The nodes of the first switch have neighbouring ranks, though Slurm lists the other one's node between them."""
    (tmp_path / "places.py").write_text(PLACES, encoding="utf-8")
    code, log = run_batch(slurm, tmp_path, "srun elastic-run places.py", "--nodes=3")
    ranks = dict(re.findall(r"trained (\d) of 3 on (\w+)", log))
    assert (code, ranks) == (0, {"0": "node0", "1": "node2", "2": "node1"}), log


def test_workers_save_before_the_time_is_over(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With --shutdown-timeout above KillWait (10 s here) stop_requested() is true so much earlier; a line says so."""
    (tmp_path / "saves.py").write_text(SAVES, encoding="utf-8")
    body = (
        f"{TELL_END.format(seconds=30)}"
        "srun elastic-run --shutdown-timeout=20 saves.py\n"
        "(($(date +%s) < SLURM_JOB_END_TIME)) && echo in time"
    )
    code, log = run_batch(slurm, tmp_path, body, "--nodes=1", "--ntasks=1", "--time=1")
    assert (code, re.findall("^(?:training|asked|saved|in time)$", log, re.MULTILINE)) == (
        0,
        ["training", "asked", "saved", "in time"],
    ), log
    assert re.search(r"the job's time limit is in \d+ s: stop_requested\(\) is true in the workers", log), log


def test_a_job_with_requeue_is_run_again_before_its_time_is_over(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Without --signal: the launcher stops the workers in time, and asks Slurm to run the job again."""
    script = (
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then {TELL_END.format(seconds=12)}'
        "exec srun elastic-run --requeue=1 --shutdown-timeout=4 --no-python sleep 600; fi\n"
        "srun elastic-run train.py"
    )
    run_batch(slurm, tmp_path, script, "--nodes=1", "--ntasks=1", "--time=1", "--requeue", "--open-mode=append")
    log = tmp_path / "job.log"
    wait_until(lambda: trained(log.read_text(encoding="utf-8")) == ["0 of 1"], deadline=120, what="the second life")
    text = log.read_text(encoding="utf-8")
    assert "stopping the workers, to run the job again" in text, text
    assert text.count("is requeued (1 of 1)") == 1, text


def warn(slurm: SlurmCluster, job: Submitted, element: int) -> None:
    """Send SIGTERM to the steps of one job of a chain, as --signal=TERM@120 does."""
    number = slurm.run("squeue", "-h", "-j", f"{job.number}_{element}", "-o", "%A").strip()
    slurm.run("scancel", "--signal=TERM", f"{number}.0")


def test_a_chain_of_jobs_goes_on_from_the_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    """chain.sbatch: the first job is warned, the second one goes on, the third finds the training done."""
    job = Submitted(slurm, tmp_path, "slurm/chain.sbatch", ENDLESS)
    job.wait_line("^step 10:")
    warn(slurm, job, 1)
    job.wait_line("^resumed at step [1-9]")
    (tmp_path / f"done-{job.number}").touch()
    warn(slurm, job, 2)
    job.wait_line("^job 3 of the chain: the training is done$")
    slurm.cancel(job.number)
    wait_until(lambda: not slurm.run("squeue", "-h"), deadline=LIFE, what="all jobs gone")


def test_a_container_reads_the_step_from_its_variables(slurm: SlurmCluster, tmp_path: Path) -> None:
    """apptainer.sbatch, with a program in apptainer's place that only runs the command behind the image."""
    stub = tmp_path / "bin" / "apptainer"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/bash\n[[ "$*" == "exec --nv --bind=$PWD image.sif elastic-run "* ]] && shift 4 && exec "$@"\n',
        encoding="utf-8",
    )
    stub.chmod(0o755)
    job = Submitted(
        slurm, tmp_path, "slurm/apptainer.sbatch", "--steps=20", env={"IMAGE": "image.sif"}, programs=str(stub.parent)
    )
    assert slurm.wait_end(job.number, deadline=LIFE).state == "COMPLETED", job.log
    assert re.search(r"^restart 0: the workers are \[\d+, \d+\]$", job.log, re.MULTILINE), job.log
