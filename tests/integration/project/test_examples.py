"""Every example does what its first lines say, run by the command that stands there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.local_rendezvous import COPIED
from tests.support.processes import TEST_TOKEN
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from tests.support.launch import Launch


EXAMPLES = Path(__file__).parents[3] / "examples"
#: The import of these takes two seconds of a processor, and each worker needs them.
MODULES = "torch,torch._dynamo"
WARM = f"--preload={MODULES}"


@pytest.mark.long
def test_minimal_ddp(launch: Launch) -> None:
    """Two workers that average their gradients learn the one model."""
    # Without the token Python collects garbage at the end as for users. It must find no model that outlived its group.
    job = launch("--standalone", "--nproc-per-node=2", EXAMPLES / "minimal_ddp.py", env={TEST_TOKEN: None})
    assert job.wait_exit() == 0, job.stderr
    assert "learned y = 2.00a + 3.00b on 2 workers" in job.stdout


def test_restart(launch: Launch, tmp_path: Path) -> None:
    """A worker that fails twice goes on where it stopped, and the job succeeds."""
    job = launch("--standalone", "--max-restarts=3", EXAMPLES / "restart.py", tmp_path / "progress.json")
    assert job.wait_exit() == 0, job.stderr
    attempts = ["attempt 0 begins at step 0", "attempt 1 begins at step 3", "attempt 2 begins at step 6"]
    assert job.stdout.splitlines() == [*attempts, "done at step 9, after 2 restarts"]


def test_output(launch: Launch, tmp_path: Path) -> None:
    """--tee=1 shows stdout with a prefix and keeps it; --redirects=2 keeps stderr only."""
    flags = ["--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", "--tee=1", "--redirects=2"]
    job = launch(*flags, EXAMPLES / "output.py")
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[default0]:rank 0 says hello", "[default1]:rank 1 says hello"]
    assert "details" not in job.stderr
    for rank in "01":
        (stdout,) = tmp_path.glob(f"*_*/attempt_0/{rank}/stdout.log")
        assert stdout.read_text(encoding="utf-8") == f"rank {rank} says hello\n"
        assert "details" in stdout.with_name("stderr.log").read_text(encoding="utf-8")


def test_record(launch: Launch, tmp_path: Path) -> None:
    """A failure under @record is in error.json and in the report, and the exit code is the worker's."""
    job = launch("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}", EXAMPLES / "record.py")
    assert job.wait_exit() == 1
    (error,) = tmp_path.glob("*_*/attempt_0/1/error.json")
    assert "the learning rate must be positive" in json.loads(error.read_text(encoding="utf-8"))["message"]["message"]
    assert "the learning rate must be positive, not -0.1" in job.stderr


def test_program(launch: Launch) -> None:
    """A shell script is a worker like any other, with its local rank as an argument."""
    job = launch("--standalone", "--nproc-per-node=2", "--no-python", EXAMPLES / "program.sh", "${local_rank}")
    assert job.wait_exit() == 0, job.stderr
    expected = [f"worker {rank} of 2, local rank {rank}, meets the others at localhost" for rank in range(2)]
    assert sorted(job.stdout.splitlines()) == expected


def test_checkpoint_on_signal(launch: Launch, tmp_path: Path) -> None:
    """A forwarded SIGUSR1 makes every worker save, and the job goes on to its end."""
    flags = ["--standalone", "--nproc-per-node=2", "--forward-signals=SIGUSR1"]
    job = launch(*flags, EXAMPLES / "checkpoint_on_signal.py", tmp_path)
    job.wait_lines("trains", count=2)
    job.send(signal.SIGUSR1)
    assert job.wait_exit() == 0, job.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.txt", "rank1.txt"]


@pytest.mark.long
def test_sbatch_script(launch: Launch, tmp_path: Path) -> None:
    """With the variables that Slurm sets, the batch script starts a worker for each CPU, and they train."""
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "2"}
    slurm["PET_PRELOAD"] = MODULES
    job = launch(EXAMPLES / "job.sbatch", "--steps=10", program=["bash"], env={**COPIED, **slurm}, cwd=EXAMPLES.parent)
    assert job.wait_exit() == 0, job.stderr
    assert "step 10: loss" in job.stdout
    assert (tmp_path / "model-4711.pt").exists()


@pytest.mark.long
def test_main_job_recovers_from_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo`: a worker is killed, the job restarts, resumes and learns; the last line says so."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PET_PRELOAD", MODULES)
    demo = subprocess.run(
        [sys.executable, EXAMPLES / "resume" / "demo.py"], check=False, capture_output=True, text=True
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    last = demo.stdout.splitlines()[-1]
    assert last.startswith("demo: loss 2.")
    assert "1 restart, resumed at step " in last
    assert last.endswith(": ok")


@pytest.mark.long
@pytest.mark.parametrize("example", [pytest.param("kept_state.py", marks=pytest.mark.soak), "kept_state_fsdp.py"])
def test_kept_state_goes_on_from_the_last_step(example: str, launch: Launch) -> None:
    """A worker ends after step 50, and both go on from there, not from the beginning; also with sharded models."""
    flags = (
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--keep-state=64MB",
        f"{WARM},torch.distributed.fsdp",
    )
    job = launch(*flags, EXAMPLES / example)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    begun = sorted(line for line in job.stdout.splitlines() if "begins" in line)
    assert begun == [f"rank {rank} begins after step {step}" for rank in (0, 1) for step in (0, 50)]
    assert job.stdout.splitlines()[-1] == "done at step 100"


@pytest.mark.long
def test_elastic_training_outlives_a_kill(launch: Launch, tmp_path: Path) -> None:
    """A worker is killed in the middle of an epoch: both go on, and each sample is used once per epoch."""
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", WARM]
    script = [EXAMPLES / "elastic_training.py", "--pace=0.01", "--epochs=2", "--save-every=5"]
    job = launch(*flags, *script, f"--checkpoint={tmp_path / 'elastic.pt'}")
    victim = int(job.wait_line(r"^rank 1 of 2 is process (\d+)")[1])
    job.wait_line("^epoch 0, sample 120:")
    os.kill(victim, signal.SIGKILL)
    assert job.wait_exit() == 0, job.stderr
    assert re.search(r"^resumed in epoch 0 at sample [1-4]\d\d$", job.stdout, re.MULTILINE), job.stdout
    done = re.findall(r"^epoch (\d) done: each sample used (.*) times", job.stdout, re.MULTILINE)
    assert done == [("0", "1 to 1"), ("1", "1 to 1")]


@pytest.mark.soak
def test_elastic_training_takes_a_second_node(launch: Launch, tmp_path: Path) -> None:
    """A node comes in the middle of an epoch: the worker is told, saves, and both go on with what is left of it."""
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=example"]
    flags = [*meeting, "--rdzv-conf=last_call_timeout=0", "--scale-up-delay=0", "--scale-up-signal=SIGUSR1"]
    script = [EXAMPLES / "elastic_training.py", f"--checkpoint={tmp_path / 'elastic.pt'}", "--save-every=5"]
    first = launch(*flags, *script, "--pace=0.02")
    first.wait_line("^epoch 0, sample 40:")
    second = launch(*flags, *script, "--pace=0.02")
    codes = [first.wait_exit(deadline=100), second.wait_exit(deadline=100)]
    assert codes == [0, 0], first.stderr + second.stderr
    text = first.stdout + second.stdout
    assert text.index("saved, and stopped as asked") < text.index("resumed in epoch 0 at sample")
    assert "rank 1 of 2 is process" in text
    done = re.findall(r"^epoch (\d) done: each sample used (.*) times", text, re.MULTILINE)
    assert done == [("0", "1 to 1"), ("1", "1 to 1"), ("2", "1 to 1")]


def test_every_example_is_run_here() -> None:
    """No example stays untried, here or on Slurm."""
    names = ("test_examples.py", "test_health_check.py", "test_slurm.py", "test_slurm_limits.py")
    source = "".join(path.read_text() for name in names for path in Path(__file__).parents[1].rglob(name))
    scripts = [path for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".sh", ".sbatch"}]
    assert [path.name for path in scripts if path.name not in source and path.name != "train.py"] == []


@pytest.mark.long
def test_timer(launch: Launch) -> None:
    """A worker that hangs is killed at its deadline, and the next attempt makes all steps."""
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--preload=torch"]
    job = launch(*flags, EXAMPLES / "timer.py", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert job.wait_exit() == 0, job.stderr
    assert {f"rank {rank} has made 3 steps, after 1 restarts" for rank in "01"} <= set(job.stdout.splitlines())
    assert re.search(r"timer scope 'step 1' expired after \S+ s; it gets SIGKILL", job.stderr)


def test_functions(launch: Launch) -> None:
    """A function's values come back by rank after a restart, and its exception without one."""
    job = launch(EXAMPLES / "functions.py", program=[sys.executable])
    assert job.wait_exit() == 0, job.stderr
    values = ["rank 0 returned (0, 1.0)", "rank 1 returned (1, 1.0)"]
    failed = "without restarts: rank 1: RuntimeError: the first attempt is always bad"
    assert job.stdout.splitlines()[:3] == [*values, failed]
    assert sorted(job.stdout.splitlines()[3:]) == [f"process {index} says hello to the world" for index in (0, 1)]


@pytest.mark.long
def test_timer_functions(launch: Launch) -> None:
    """Functions as workers with timers: the exception names the scope."""
    job = launch(EXAMPLES / "timer_functions.py", program=[sys.executable])
    assert job.wait_exit() == 0, job.stderr
    assert re.fullmatch(r"rank 1: timer scope 'second step' expired after \S+ s\n", job.stdout)


def test_metrics(launch: Launch) -> None:
    """Each group has its handler, and an event is one line of JSON."""
    job = launch(EXAMPLES / "metrics.py", program=[sys.executable])
    assert job.wait_exit() == 0, job.stderr
    first, second = job.stdout.splitlines()
    assert first.endswith("[other]: epochs=1")
    assert second == "12 samples in 3 steps"
    assert json.loads(job.stderr)["metadata"] == {"step": 3, "loss": 0.25}
