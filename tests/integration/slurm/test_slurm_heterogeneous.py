"""Heterogeneous jobs on a real Slurm: a step on all components is one job, and one on some says that it is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.slurm.test_slurm_steps import run_batch, trained
from tests.support.slurm import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

COMPONENTS = "#SBATCH --nodes=1 --ntasks-per-node=1\n#SBATCH hetjob\n#SBATCH --nodes=2 --ntasks-per-node=1\n"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes whose scheduler knows heterogeneous jobs."""
    with slurm_cluster(3, scheduler="backfill") as cluster:
        yield cluster


def test_a_step_on_all_components_is_one_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Three ranks on the nodes of both components, and the endpoint names all three nodes."""
    code, log = run_batch(slurm, tmp_path, f"{COMPONENTS}srun --het-group=0,1 elastic-run train.py")
    assert (code, trained(log)) == (0, ["0 of 3", "1 of 3", "2 of 3"]), log
    assert "--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=node0:" in log


def test_a_step_on_one_component_says_that_each_task_trains_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The variables of such a step can't be told from those of one component of a larger step."""
    code, log = run_batch(slurm, tmp_path, f"{COMPONENTS}srun --het-group=1 elastic-run train.py")
    assert (code, trained(log)) == (0, ["0 of 1", "0 of 1"]), log
    assert log.count("runs a job of its own: the job is heterogeneous") == 2


def test_a_batch_script_without_srun_names_the_step_for_all_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`elastic-run train.py` is a job of one node; the command that the line shows is one job on all components."""
    code, log = run_batch(slurm, tmp_path, f"{COMPONENTS}elastic-run train.py")
    assert (code, trained(log)) == (0, ["0 of 1"]), log
    mend = re.search(r"this Slurm job has 2 other nodes, .*: (srun .+ elastic-run) …$", log, re.MULTILINE)
    assert mend is not None, log
    code, log = run_batch(slurm, tmp_path, f"{COMPONENTS}{mend[1]} train.py")
    assert (code, trained(log)) == (0, ["0 of 3", "1 of 3", "2 of 3"]), log
