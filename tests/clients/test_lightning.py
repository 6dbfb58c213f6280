"""lightning: its wheel and elastic-run are all that it takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

FABRIC_RUN = ("fabric", "run", "--accelerator=cpu", "--devices=2", "--strategy=ddp")


def test_fabric_run_trains(with_compat: Callable[..., Launched], free_port: int) -> None:
    """`fabric run` through compat starts its workers with elastic-run, and Fabric finds its place in them."""
    job = with_compat(*FABRIC_RUN, f"--main-port={free_port}", PROGRAMS / "fabric_script.py")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, TorchElasticEnvironment, elastic-run" for rank in range(2)
    ]


def test_fabric_run_fails_as_it_does_under_torchrun(with_compat: Callable[..., Launched], free_port: int) -> None:
    """`fabric run` calls torchrun's `main`, which raises: it ends with 1, and what was raised tells the cause."""
    job = with_compat(*FABRIC_RUN, f"--main-port={free_port}", PROGRAMS / "fabric_script.py", "fail")
    assert job.wait_exit(deadline=90) == 1
    assert "ChildFailedError" in job.stderr
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: 7 ", job.stderr), job.stderr


def test_a_trainer_resumes(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """A lightning Trainer whose worker is killed goes on from its checkpoint after the restart."""
    job = launch("--nproc-per-node=2", "--max-restarts=1", PROGRAMS / "lightning_trainer.py", tmp_path / "saved")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, TorchElasticEnvironment, resumed, step 12" for rank in range(2)
    ]
