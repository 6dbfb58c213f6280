"""Every example does what its first lines say, run by the command that stands there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_minimal_ddp(launch: Launch) -> None:
    """Two workers that average their gradients learn the one model."""
    job = launch("--standalone", "--nproc-per-node=2", EXAMPLES / "minimal_ddp.py")
    assert job.wait_exit() == 0, job.stderr
    assert "learned y = 2.00a + 3.00b on 2 workers" in job.stdout


def test_restart(launch: Launch, tmp_path: Path) -> None:
    """A worker that fails twice goes on where it stopped, and the job succeeds."""
    job = launch("--standalone", "--max-restarts=3", EXAMPLES / "restart.py", tmp_path / "progress.json")
    assert job.wait_exit() == 0, job.stderr
    lives = ["life 0 begins at step 0", "life 1 begins at step 3", "life 2 begins at step 6"]
    assert job.stdout.splitlines() == [*lives, "done at step 9, after 2 restarts"]


def test_output(launch: Launch, tmp_path: Path) -> None:
    """--tee=1 shows stdout with a prefix and keeps it; --redirects=2 keeps stderr only."""
    flags = ["--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", "--tee=1", "--redirects=2"]
    job = launch(*flags, EXAMPLES / "output.py")
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[default0]:rank 0 says hello", "[default1]:rank 1 says hello"]
    assert "details" not in job.stderr
    for rank in "01":
        (stdout,) = tmp_path.glob(f"*/attempt_0/{rank}/stdout.log")
        assert stdout.read_text(encoding="utf-8") == f"rank {rank} says hello\n"
        assert "details" in stdout.with_name("stderr.log").read_text(encoding="utf-8")


def test_record(launch: Launch, tmp_path: Path) -> None:
    """A failure under @record is in error.json and in the report, and the exit code is the worker's."""
    job = launch("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", EXAMPLES / "record.py")
    assert job.wait_exit() == 1
    (error,) = tmp_path.glob("*/attempt_0/1/error.json")
    assert "the learning rate must be positive" in json.loads(error.read_text(encoding="utf-8"))["message"]["message"]
    assert "the learning rate must be positive, not -0.1" in job.stderr


def test_program(launch: Launch) -> None:
    """A shell script is a worker like any other, with its local rank as an argument."""
    job = launch("--standalone", "--nproc-per-node=2", "--no-python", EXAMPLES / "program.sh", "${local_rank}")
    assert job.wait_exit() == 0, job.stderr
    expected = [f"worker {rank} of 2, local rank {rank}, meets the others at 127.0.0.1" for rank in range(2)]
    assert sorted(job.stdout.splitlines()) == expected


def test_checkpoint_on_signal(launch: Launch, tmp_path: Path) -> None:
    """A forwarded SIGUSR1 makes every worker save, and the job goes on to its end."""
    flags = ["--standalone", "--nproc-per-node=2", "--forward-signals=SIGUSR1"]
    job = launch(*flags, EXAMPLES / "checkpoint_on_signal.py", tmp_path)
    job.wait_lines("trains", count=2)
    job.send(signal.SIGUSR1)
    assert job.wait_exit() == 0, job.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.txt", "rank1.txt"]


def test_sbatch_script(launch: Launch, tmp_path: Path) -> None:
    """The batch script, with the variables that Slurm sets, trains on as many workers as it has CPUs."""
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "2", "PATH": binaries}
    job = launch(EXAMPLES / "job.sbatch", "--steps=10", program=["bash"], env=slurm, cwd=EXAMPLES.parent)
    assert job.wait_exit() == 0, job.stderr
    assert "step 10: loss" in job.stdout
    assert (tmp_path / "model-4711.pt").exists()


def test_main_job_recovers_from_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo`: a worker is killed, the job restarts, resumes and learns; the last line says so."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    demo = subprocess.run(
        [sys.executable, EXAMPLES / "resume" / "demo.py"], check=False, capture_output=True, text=True
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    last = demo.stdout.splitlines()[-1]
    assert last.startswith("demo: loss 2.")
    assert "1 restart, resumed at step " in last
    assert last.endswith(": ok")


def test_every_example_is_run_here() -> None:
    """No example stays untried, here or on Slurm."""
    source = "".join(Path(__file__).with_name(name).read_text() for name in ("test_examples.py", "test_slurm.py"))
    scripts = [path for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".sh", ".sbatch"}]
    assert [path.name for path in scripts if path.name not in source and path.name != "train.py"] == []
