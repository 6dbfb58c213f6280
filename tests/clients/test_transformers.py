"""transformers: its wheel, accelerate's (which its Trainer needs) and elastic-run are all that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched


def test_a_trainer_resumes(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """A Trainer whose worker is killed goes on from its checkpoint after the restart, on both workers."""
    job = launch("--nproc-per-node=2", "--max-restarts=1", PROGRAMS / "transformers_trainer.py", tmp_path / "saved")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, from checkpoint-3 to step 6" for rank in range(2)
    ]
