"""accelerate, lightning and transformers: their wheels and elastic-run are all that they take."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from tests.support.launch import Launch


# --- accelerate -------------------------------------------------------------------------------------------------------
#: `--multi_gpu` is how accelerate is told to use torch's launcher; without a GPU it trains on the CPU.
LAUNCH = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no"),
)


def test_accelerate_launch_restarts(launch: Launch, tmp_path: Path) -> None:
    """With ELASTIC_RUN_COMPAT=1, elastic-run starts and restarts the workers of `accelerate launch`."""
    name, *words = LAUNCH
    command = [Path(sys.executable).parent / name]
    env = {"ELASTIC_RUN_COMPAT": "1", "PET_PRELOAD": "accelerate,torch._dynamo"}
    job = launch(
        *words, "--max_restarts=1", PROGRAMS / "accelerated.py", "crash", program=command, env=env, cwd=tmp_path
    )
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [
        f"rank {rank} of 2, DistributedDataParallel, 4 steps, life 1, elastic-run" for rank in range(2)
    ]


@pytest.mark.soak
def test_accelerate_launch_is_stopped(with_compat: Launch) -> None:
    """SIGTERM to `accelerate launch` stops its workers as well, at once."""
    job = with_compat(*LAUNCH, PROGRAMS / "accelerated.py", "wait")
    job.wait_lines("^waiting$", count=2, deadline=90)
    job.send(signal.SIGTERM)
    assert job.wait_exit(deadline=20) != 0
    assert "SignalException" in job.stderr


def test_accelerator_finds_its_place_under_elastic_run(launch: Launch) -> None:
    """A script that uses accelerate runs under the plain command as well."""
    job = launch("--nproc-per-node=2", PROGRAMS / "accelerated.py")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert job.stdout.count("of 2, DistributedDataParallel, 4 steps") == len(job.stdout.splitlines()) == 2


def test_notebook_launcher_runs_a_function(with_compat: Launch) -> None:
    """`notebook_launcher` runs a function in two forked workers, and the program goes on."""
    job = with_compat(PROGRAMS / "notebook.py", "train")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if not line.startswith("Launching"))
    assert lines == [*(f"rank {rank} of 2, sum 3, elastic-run" for rank in range(2)), "the notebook goes on"]


@pytest.mark.soak
def test_notebook_launcher_raises_what_a_worker_raised(with_compat: Launch) -> None:
    """A worker's exception reaches the notebook as ChildFailedError, with its text."""
    job = with_compat(PROGRAMS / "notebook.py", "fail")
    assert job.wait_exit(deadline=90) == 1
    assert "RuntimeError: out of luck" in job.stderr
    assert "ChildFailedError" in job.stderr
    assert "the notebook goes on" not in job.stdout


# --- lightning --------------------------------------------------------------------------------------------------------
#: lightning itself can't be preloaded: it reads LOCAL_RANK when it is imported.
PRELOAD = "torch._dynamo,torch.distributed.fsdp"
FABRIC_RUN = ("fabric", "run", "--accelerator=cpu", "--devices=2", "--strategy=ddp")


def test_fabric_run_trains(with_compat: Launch, free_port: int) -> None:
    """`fabric run` through compat starts its workers with elastic-run, and Fabric finds its place in them."""
    words = (f"--main-port={free_port}", PROGRAMS / "fabric_script.py")
    job = with_compat(*FABRIC_RUN, *words, env={"PET_PRELOAD": PRELOAD})
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, TorchElasticEnvironment, elastic-run" for rank in range(2)
    ]


def test_a_trainer_resumes(launch: Launch, tmp_path: Path) -> None:
    """A lightning Trainer whose worker is killed goes on from its checkpoint after the restart."""
    flags = ("--nproc-per-node=2", "--max-restarts=1", f"--preload={PRELOAD}")
    job = launch(*flags, PROGRAMS / "lightning_trainer.py", tmp_path / "saved")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, TorchElasticEnvironment, resumed, step 12" for rank in range(2)
    ]


# --- transformers, whose Trainer needs accelerate ---------------------------------------------------------------------
def test_a_trainer_of_transformers_resumes(launch: Launch, tmp_path: Path) -> None:
    """A Trainer whose worker is killed goes on from its checkpoint after the restart, on both workers."""
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--preload=transformers.trainer,accelerate,torch._dynamo")
    job = launch(*flags, PROGRAMS / "transformers_trainer.py", tmp_path / "saved")
    assert job.wait_exit(deadline=90) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2, from checkpoint-3 to step 6" for rank in range(2)
    ]
