"""A shell with all variables of a real Slurm step, during the step's job and after it, on a node of the job."""

from __future__ import annotations

import os
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
#: A node here is a namespace of processes, of which nothing follows; the launcher takes this one for that of a host.
LAUNCHER = """
import os, sys
from elastic_run.schedulers import slurm_variables as running_step
running_step._HOST_NAMESPACE = os.readlink("/proc/self/ns/pid")
running_step._CONTAINER_MARKS = ()
from elastic_run.run import run_command
run_command(sys.argv[1:])
"""
TRAINING = "import os\nos.write(1, 'trained {RANK} of {WORLD_SIZE}\\n'.format(**os.environ).encode())\n"
#: The first task writes its variables down and leaves a daemon; both nodes train; so does a launcher without a parent.
STEPS = """
srun bash -c '[ $SLURM_PROCID != 0 ] || { export -p > step.env; }'
srun python launcher.py train.py > in-step.log 2>&1
srun --nodes=1 --ntasks=1 bash -c '. ./step.env; python launcher.py train.py > other-step.log 2>&1'
srun bash -c '(setsid bash -c "sleep 1; exec python launcher.py train.py >> daemon.log 2>&1" &) ; sleep 4'
srun bash -c '(setsid bash -c "sleep 1; exec python launcher.py --nnodes=2 --rdzv-backend=c10d --rdzv-id=a \\
    --rdzv-endpoint=node0:29400 train.py >> told.log 2>&1" &) ; sleep 6'
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes."""
    with slurm_cluster(2) as cluster:
        yield cluster


def test_variables_of_a_step_count_in_its_tasks_only(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Tasks are one job; another step, a daemon and a shell after the job train alone and say so, unless told more."""
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{STEPS}", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = slurm.submit("--no-requeue", "--nodes=2", "--ntasks-per-node=1", script, env=env, cwd=tmp_path)
    slurm.wait_end(job)
    slurm.wait_cleared(job)

    def lines(name: str) -> list[str]:
        return (tmp_path / name).read_text(encoding="utf-8").splitlines()

    assert sorted(line for line in lines("in-step.log") if "trained" in line) == ["trained 0 of 2", "trained 1 of 2"]
    assert sorted(line for line in lines("told.log") if "trained" in line) == ["trained 0 of 2", "trained 1 of 2"]
    node = next(host for host in slurm.hosts if host.name == "node0")
    shell = node.start(["bash", "-c", ". ./step.env; exec python launcher.py train.py"], env=env, cwd=tmp_path)
    assert shell.wait_exit() == 0
    told = f"SLURM_JOB_ID={job}, SLURM_STEP_ID=%s, SLURM_STEP_NODELIST=node[0-1] and others are left over from a "
    for step, found in (
        ("0", lines("other-step.log")),
        ("3", lines("daemon.log")),
        ("0", [*shell.stderr.splitlines(), *shell.stdout.splitlines()]),
    ):
        notices = [line for line in found if told % step in line]
        trained = [line for line in found if "trained" in line]
        assert trained == ["trained 0 of 1"] * len(notices), found
        assert notices, found
    wait_until(lambda: not slurm.processes(), what="nothing left")
