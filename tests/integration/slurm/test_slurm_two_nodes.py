"""Two nodes of a real Slurm: left-over variables, two jobs at once, long checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- two jobs at once, and a checkpoint of 20 seconds -----------------------------------------------------------------
ROOT = Path(__file__).parents[3]
_TWO = ("--nodes=2", "--ntasks-per-node=1")
#: Ends when the workers of the other job run too.
TOGETHER = """
import os, pathlib, time
job = os.environ["SLURM_JOB_ID"]
os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
pathlib.Path(f"runs-{job}-{os.environ['RANK']}").touch()
while len(list(pathlib.Path().glob("runs-*"))) < 4:
    time.sleep(0.05)
"""
#: Saves for 20 s once it is told to stop.
SAVES = """
import os, signal, time
def save(*_):
    time.sleep(20)
    os.write(1, b"saved {RANK}\\n".replace(b"{RANK}", os.environ["RANK"].encode()))
    raise SystemExit
signal.signal(signal.SIGTERM, save)
os.write(1, b"training\\n")
signal.pause()
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes with the grace that Slurm has by default, and a partition for urgent jobs."""
    with slurm_cluster(2, kill_wait=30, grace=30) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_jobs_at_once_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two jobs of the shortest script on the same two nodes train two ranks each, at the same time."""
    (tmp_path / "train.py").write_text(TOGETHER, encoding="utf-8")
    logs = ("first.log", "second.log")
    jobs = [slurm.submit_script(tmp_path, "srun elastic-run train.py", *_TWO, log=log) for log in logs]
    assert [slurm.wait_end(job).exit_code for job in jobs] == [0, 0]
    for log in logs:
        text = (tmp_path / log).read_text(encoding="utf-8")
        assert sorted(re.findall(r"trained (\d of \d)", text)) == ["0 of 2", "1 of 2"], text


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_preempted", [False, True], ids=["scancel", "preemption"])
def test_a_checkpoint_of_20_seconds_completes(slurm: SlurmCluster, tmp_path: Path, *, is_preempted: bool) -> None:
    """The workers save for 20 s, inside --shutdown-timeout and Slurm's 30 s, and nothing is left on the nodes."""
    (tmp_path / "train.py").write_text(SAVES, encoding="utf-8")
    log = tmp_path / "job.log"
    job = slurm.submit_script(tmp_path, "exec srun elastic-run --shutdown-timeout=27 train.py", *_TWO, "--exclusive")
    wait_until(lambda: log.exists() and log.read_text().count("training\n") == 2, what="the workers run")
    if is_preempted:
        urgent = slurm.submit_script(
            tmp_path, "srun true", *_TWO, "--exclusive", "--partition=urgent", log="urgent.log"
        )
        assert slurm.wait_end(urgent).state == "COMPLETED"
    else:
        slurm.cancel(job)
    slurm.wait_end(job)
    slurm.wait_cleared(job)
    text = log.read_text(encoding="utf-8")
    assert sorted(re.findall(r"saved (\d)", text)) == ["0", "1"], text
    assert slurm.processes() == []


# --- a shell with the variables of a step -----------------------------------------------------------------------------
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


@pytest.mark.long
@pytest.mark.timeout(300)
def test_variables_of_a_step_count_in_its_tasks_only(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Tasks are one job; another step, a daemon and a shell after the job train alone and say so, unless told more."""
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    job = slurm.submit_script(tmp_path, STEPS, "--nodes=2", "--ntasks-per-node=1")
    slurm.wait_end(job)
    slurm.wait_cleared(job)

    def lines(name: str) -> list[str]:
        return (tmp_path / name).read_text(encoding="utf-8").splitlines()

    assert sorted(line for line in lines("in-step.log") if "trained" in line) == ["trained 0 of 2", "trained 1 of 2"]
    assert sorted(line for line in lines("told.log") if "trained" in line) == ["trained 0 of 2", "trained 1 of 2"]
    node = next(host for host in slurm.hosts if host.name == "node0")
    shell = node.start(["bash", "-c", ". ./step.env; exec python launcher.py train.py"], cwd=tmp_path)
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
