"""Launchers of one Slurm step that were given different places or ids: each is refused, in a line with the mend."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
#: Seconds from the start of a launcher to its end, 0.3 to 0.7 on a quiet machine. One launcher begins before the other.
_SOON = 2.0
#: Each line of the log begins with the node, and the last one of a launcher has its exit code and its seconds.
STEP = """
srun --kill-on-bad-exit=0 --wait=0 --label bash -c '
begin=$(date +%s%N)
elastic-run {flags} train.py
echo ended with $? after $((($(date +%s%N) - begin) / 1000000)) ms'
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes, for all tests here."""
    with slurm_cluster(2) as cluster:
        yield cluster


def run_step(slurm: SlurmCluster, directory: Path, flags: str) -> str:
    """Run one launcher on each of two nodes to its end, and return what they have written."""
    (directory / "train.py").write_text("import os\nprint('trained', os.environ['WORLD_SIZE'])", encoding="utf-8")
    script = directory / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{STEP.format(flags=flags)}", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = slurm.submit(
        "--output=job.log", "--no-requeue", "--nodes=2", "--ntasks-per-node=1", script, env=env, cwd=directory
    )
    slurm.wait_end(job)
    return (directory / "job.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=$(hostname):29400",
            r"--rdzv-endpoint: is node\d:29400 here and node\d:29400 on node\d of the same Slurm step",
        ),
        (
            "--nnodes=1:2 --rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=$(hostname):29400",
            r"--rdzv-endpoint: is node\d:29400 here and node\d:29400 on node\d of the same Slurm step",
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-id=a$SLURM_NODEID --rdzv-endpoint=$FIRST:29400",
            r"--rdzv-id: is a\d here and a\d on node\d of the same Slurm step",
        ),
    ],
    ids=["each node its own endpoint", "the same, elastic", "each node its own id"],
)
def test_launchers_of_a_step_that_contradict_each_other_are_refused(
    slurm: SlurmCluster, tmp_path: Path, flags: str, told: str
) -> None:
    """Both sides end with 208 within seconds, not after join_timeout, nor as two jobs of one node each."""
    log = run_step(
        slurm, tmp_path, flags.replace("$FIRST", "$(scontrol show hostnames $SLURM_STEP_NODELIST | head -1)")
    )
    ends = re.findall(r"\d: ended with (\d+) after (\d+) ms", log)
    assert [int(code) for code, _ in ends] == [contract.EXIT_REFUSED] * 2, log
    assert "trained" not in log
    flat = " ".join(re.sub(r"(?m)^\d: ", "", log).split())
    assert len(re.findall(told, flat)) >= 2, log
    assert max(int(milliseconds) for _, milliseconds in ends) < 1000 * stretched(_SOON), log


@pytest.mark.parametrize("endpoint", ["$(scontrol show hostnames $SLURM_STEP_NODELIST | head -1)", "node1"])
def test_one_place_for_all_is_taken(slurm: SlurmCluster, tmp_path: Path, endpoint: str) -> None:
    """The first node of the step, or another one."""
    log = run_step(slurm, tmp_path, f"--nnodes=2 --rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint={endpoint}:29400")
    assert log.count("trained 2") == 2, log
