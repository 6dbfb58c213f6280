"""The batch scripts of examples/slurm on a real Slurm: they train, are cancelled, and outlive a node."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # a requeued job waits for Slurm, twice

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Seconds for a life of the job: several workers import torch at once, on the machine's few processors.
LIFE = 120.0
#: Far more steps than a test waits for.
ENDLESS = "--steps=100000"
#: Prints the lines of examples/resume/train.py without torch, whose import takes each of many workers four seconds.
LIGHT = """
import os, sys, time
from pathlib import Path
from elastic_run.store.client import StoreClient
place, steps = (word.partition("=")[2] for word in sys.argv[1:3])
place, rank, ranks = Path(place), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
step = int(place.read_text()) if place.exists() else 0
if rank == 0:
    print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}: the workers are {[0] * ranks}")
    if step: print(f"resumed at step {step}")
with StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 20.0) as store:
    while step < int(steps):
        step += 1
        if store.add(f"{step}", 1) == ranks:
            store.set(f"{step}/all", "")
        store.wait([f"{step}/all"], 20.0)
        time.sleep(0.05)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss 1")
            place.with_suffix(".partial").write_text(f"{step}")
            place.with_suffix(".partial").replace(place)
"""


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes."""
    with slurm_cluster(3) as cluster:
        yield cluster


class Submitted:
    """A job in the queue, submitted from a directory of its own.

    Args:
        slurm: The cluster.
        directory: Where it is submitted, and writes.
        script: The example's path.
        arguments: Of the training script.
        nodes: How many nodes are asked for.
        env: Variables of the job.
        programs: A directory of programs that come first.
        is_light: Whether LIGHT trains instead of examples/resume/train.py.
    """

    def __init__(
        self,
        slurm: SlurmCluster,
        directory: Path,
        script: str,
        *arguments: str,
        nodes: int = 2,
        env: dict[str, str] | None = None,
        programs: str = "",
        is_light: bool = False,
    ) -> None:
        self._log_pattern = f"{Path(script).stem}-*.log"
        self._directory = directory
        programs = os.pathsep.join([*filter(None, [programs]), str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {"PATH": programs, "TRAIN": str(EXAMPLES / "resume" / "train.py"), "OMP_NUM_THREADS": "1"}
        options = [f"--nodes={nodes}", "--cpus-per-task=1"]
        path = EXAMPLES / script
        if is_light:
            (directory / "light.py").write_text(LIGHT, encoding="utf-8")
            variables["TRAIN"] = "light.py"
        self.number = slurm.submit(*options, path, *arguments, env={**variables, **(env or {})}, cwd=directory)

    @property
    def log(self) -> str:
        """What the job has written so far, in all its lives."""
        return "".join(path.read_text(encoding="utf-8") for path in self._directory.glob(self._log_pattern))

    def wait_line(self, pattern: str, *, count: int = 1) -> None:
        """Wait until so many of the job's lines match."""
        try:
            wait_until(lambda: len(re.findall(pattern, self.log, re.MULTILINE)) >= count, deadline=LIFE, what=pattern)
        except DeadlinePassedError as error:
            message = f"{error}\n{self.log}"
            raise AssertionError(message) from error


def losses(log: str) -> list[float]:
    """Return the losses that a job has printed."""
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", log)]


def test_fixed_nodes_train_to_the_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    """fixed.sbatch: two nodes meet, one worker each, and the job is done with exit code 0."""
    job = Submitted(slurm, tmp_path, "slurm/fixed.sbatch", "--steps=30")
    assert slurm.wait_end(job.number, deadline=LIFE).state == "COMPLETED", job.log
    assert re.search(r"^restart 0: the workers are \[\d+, \d+\]$", job.log, re.MULTILINE), job.log
    assert losses(job.log)[-1] < 0.7 * losses(job.log)[0]
    wait_until(lambda: not slurm.processes(), what="Slurm's own processes gone")


@pytest.mark.parametrize("script", ["slurm/fixed.sbatch", "slurm/elastic.sbatch"])
def test_scancel_leaves_nothing(slurm: SlurmCluster, tmp_path: Path, script: str) -> None:
    """A cancelled job is gone from every node before Slurm would have to kill it."""
    job = Submitted(slurm, tmp_path, script, ENDLESS, is_light=True)
    job.wait_line("^step 10:")
    slurm.cancel(job.number)
    assert slurm.wait_end(job.number).state == "CANCELLED"
    slurm.wait_cleared(job.number)
    wait_until(lambda: not slurm.processes(), deadline=2)
    assert "SIGTERM" in job.log


@pytest.mark.soak
def test_a_failed_node_puts_a_fixed_job_back_into_the_queue(slurm: SlurmCluster, tmp_path: Path) -> None:
    """fixed.sbatch: when a node loses its power the job starts again on the others, from its checkpoint."""
    job = Submitted(slurm, tmp_path, "slurm/fixed.sbatch", "--steps=60")
    job.wait_line("^step 30:")  # so the checkpoint of step 20 is written
    slurm.hosts[1].poweroff()
    assert slurm.wait_end(job.number, deadline=LIFE).state in {"NODE_FAIL", "REQUEUED"}
    assert slurm.wait_end(job.number, count=2, deadline=LIFE).state == "COMPLETED", job.log
    assert re.search(r"^resumed at step [2-6]0$", job.log, re.MULTILINE), job.log


def test_an_elastic_job_outlives_a_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """elastic.sbatch: when a node loses its power those that are left go on, in the same job."""
    job = Submitted(slurm, tmp_path, "slurm/elastic.sbatch", "--steps=100", nodes=3, is_light=True)
    job.wait_line("^step 20:")
    slurm.hosts[2].poweroff()
    job.wait_line(r"^resumed at step")
    slurm.wait_end(job.number, deadline=LIFE)
    assert "step 100:" in job.log
    assert len(slurm.endings(job.number)) == 1, "it was not requeued"
    workers = re.findall(r"the workers are \[([\d, ]+)\]", job.log)
    assert [len(pids.split(",")) for pids in workers] == [3, 2]


def test_an_elastic_job_outlives_its_first_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """elastic.sbatch: the first node served the job's store and ran srun; the others go on and save checkpoints."""
    job = Submitted(slurm, tmp_path, "slurm/elastic.sbatch", ENDLESS, nodes=3, is_light=True)
    job.wait_line("^step 20:")
    slurm.hosts[0].poweroff()
    checkpoint = tmp_path / f"model-{job.number}.pt"
    times: list[float] = []

    def has_saved_anew() -> bool:
        times.append(checkpoint.stat().st_mtime)
        return len(set(times)) > 3  # one save may have been on its way when the power was lost

    wait_until(has_saved_anew, deadline=LIFE, what="checkpoints")
    slurm.cancel(job.number)
    slurm.wait_end(job.number)


def test_a_warning_saves_a_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    """job.sbatch: the signal of `--signal=B:USR1@120` makes the script save and go on; `scancel` ends in a report."""
    job = Submitted(slurm, tmp_path, "job.sbatch", ENDLESS, "--save-every=100000", nodes=1)
    job.wait_line("^step 1:")
    checkpoint = tmp_path / f"model-{job.number}.pt"
    assert not checkpoint.exists()
    slurm.run("scancel", "--batch", "--signal=USR1", str(job.number))
    job.wait_line(r"SIGUSR1 from pid \d+ \(slurmstepd\): passed on to rank 0$")
    job.wait_line(r"^warned: saved at step \d+$")
    assert checkpoint.exists()
    slurm.cancel(job.number)
    assert slurm.wait_end(job.number).state == "CANCELLED"
    slurm.wait_cleared(job.number)
    assert "exit code 143" in job.log


def test_etcd_nodes_train_to_the_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    """etcd.sbatch: the nodes meet in an etcd beside the cluster."""
    hub = slurm.hosts.hub
    listen = f"http://{hub.address}:2379"
    etcd = ["etcd", f"--data-dir={tmp_path / 'etcd'}", f"--listen-client-urls={listen}"]
    server = hub.start([*etcd, f"--advertise-client-urls={listen}", "--unsafe-no-fsync"], merge=True)
    server.wait_line("ready to serve|serving insecure client requests|serving client")
    env = {"ETCD": f"{hub.address}:2379"}
    job = Submitted(slurm, tmp_path, "slurm/etcd.sbatch", "--steps=30", env=env, is_light=True)
    assert slurm.wait_end(job.number, deadline=LIFE).state == "COMPLETED", job.log
    assert "step 30:" in job.log
