"""Time limits, chains, containers, switches and heterogeneous jobs on a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.integration.slurm.test_slurm import ENDLESS, LIFE, Submitted
from tests.integration.slurm.test_slurm_steps import run_batch, trained
from tests.support.slurm import KILL_WAIT, SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- four nodes -------------------------------------------------------------------------------------------------------
ROOT = Path(__file__).parents[3]
#: Seconds for a job with a limit of one minute. Slurm looks at limits every half minute.
MINUTES = 180.0
#: Says which worker of which node it is, and where all of them meet.
SAYS = """
import os
told = "{RANK} is {LOCAL_RANK} of {LOCAL_WORLD_SIZE} on {SLURMD_NODENAME}, {WORLD_SIZE} meet at {MASTER_ADDR}\\n"
os.write(1, told.format(**os.environ).encode())
"""
#: Trains until a signal comes, says which, and ends well.
HEARS = """
import os, signal, sys
def hear(number, _):
    os.write(1, f"heard {signal.Signals(number).name} {os.environ['RANK']}\\n".encode())
    sys.exit()
signal.signal(signal.SIGUSR1, hear)
signal.signal(signal.SIGTERM, hear)
os.write(1, f"trains {os.environ['RANK']}\\n".encode())
while True:
    signal.pause()
"""
#: A batch script that srun does not replace, with a handler of its own. bash's wait ends at each signal.
TRAPS = """
trap 'echo script heard; touch heard' USR1
srun elastic-run --nproc-per-node=2 train.py &
while kill -0 $! 2>/dev/null; do wait $!; test ! -e heard || scancel --signal=TERM $SLURM_JOB_ID; done
"""
#: Two device files of GPUs on a host, in a /dev of its own.
TWO_GPUS = """
mount -t tmpfs dev "$1" && cd "$1" && touch nvidiactl nvidia0 nvidia1
for name in null zero full random urandom tty; do touch $name && mount --bind /dev/$name $name; done
mkdir shm pts && mount --rbind /dev/shm shm && mount --rbind /dev/pts pts
ln -s /proc/self/fd . && ln -s pts/ptmx . && mount --move . /dev
"""


class Limited(NamedTuple):
    """A job with a limit of one minute.

    Attributes:
        option: Of sbatch.
        body: The batch script.
        state: Its end, in Slurm's words.
        signal: The signal that its workers handle.
    """

    option: str
    body: str
    state: str
    signal: str


STEP = "srun elastic-run --nproc-per-node=2 train.py"
LIMITED = {
    "limit": Limited("--comment=none", f"exec {STEP}", "TIMEOUT", "SIGTERM"),
    "steps": Limited("--signal=USR1@10", STEP, "COMPLETED", "SIGUSR1"),
    "steps-exec": Limited("--signal=USR1@10", f"exec {STEP}", "COMPLETED", "SIGUSR1"),
    "script-exec": Limited("--signal=B:USR1@10", f"exec {STEP}", "COMPLETED", "SIGUSR1"),
    "script": Limited("--signal=B:USR1@10", TRAPS, "COMPLETED", "SIGTERM"),
}


def submit(slurm: SlurmCluster, directory: Path, body: str, *options: str, env: dict[str, str] | None = None) -> int:
    """Submit a batch script, with one launcher on each node."""
    return slurm.submit_script(directory, body, "--ntasks-per-node=1", *options, env=env)


def find_programs(slurm: SlurmCluster) -> list[str]:
    """Return the command lines of what runs on the nodes, Slurm's own processes left out."""
    found = []
    for pid in slurm.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words and not words.startswith("slurmstepd"):
            found.append(words)
    return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of four nodes."""
    with slurm_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def limited(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """Submit all jobs with a limit at the same time, and return the number and the log of each."""
    jobs = {}
    for name, one in LIMITED.items():
        directory = tmp_path_factory.mktemp(name)
        (directory / "train.py").write_text(HEARS, encoding="utf-8")
        number = submit(slurm, directory, one.body, "--nodes=2", "--cpus-per-task=1", "--time=1", one.option)
        jobs[name] = (number, directory / "job.log")
    return jobs


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_shortest_script_has_a_worker_for_each_gpu_of_four_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun elastic-run train.py`, without a flag, on four nodes with two GPUs each is one job of eight ranks."""
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.13.0'\ncuda = '12.8'\n", encoding="ascii")
    for host in slurm.hosts:
        (tmp_path / host.name).mkdir()
        host.run("sh", "-ec", TWO_GPUS, "sh", tmp_path / host.name)
    (tmp_path / "train.py").write_text(SAYS, encoding="utf-8")
    job = submit(
        slurm, tmp_path, "exec srun elastic-run train.py", "--nodes=4", env={"PYTHONPATH": f"{package.parent}:{ROOT}"}
    )
    ending = slurm.wait_end(job)
    log = (tmp_path / "job.log").read_text(encoding="utf-8")
    assert ending.state == "COMPLETED", log
    first = slurm.hosts[0]
    expected = [f"{rank} is {rank % 2} of 2 on node{rank // 2}, 8" for rank in range(8)]
    assert sorted(re.findall("^(.*) meet at ", log, re.MULTILINE)) == expected, log
    (place,) = set(re.findall(" meet at (.*)", log))
    assert place in {first.name, first.address, first.address6}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_job_stays_in_completing(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job of four nodes is cancelled: no process is left, and Slurm calls it gone before it would have to kill."""
    # This test comes before those with a time limit, because their jobs occupy the nodes for a minute.
    (tmp_path / "train.py").write_text(HEARS, encoding="utf-8")
    job = submit(slurm, tmp_path, STEP, "--nodes=4")
    log = tmp_path / "job.log"
    wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").count("trains") == 8, what="the workers run")
    slurm.cancel(job)

    def is_gone() -> bool:
        return not slurm.run("squeue", "-h", "-j", str(job)) and not find_programs(slurm)

    wait_until(is_gone, deadline=0.9 * KILL_WAIT, what="job and processes gone")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param("limit", marks=pytest.mark.soak), *list(LIMITED)[1:]])
def test_workers_hear_of_the_time_limit(slurm: SlurmCluster, limited: dict[str, tuple[int, Path]], name: str) -> None:
    """Slurm sends SIGTERM at the time limit, and the signal of --signal before it, as docs/slurm.md says."""
    (number, path), one = limited[name], LIMITED[name]
    ending = slurm.wait_end(number, deadline=MINUTES)
    slurm.wait_cleared(number)
    log = path.read_text(encoding="utf-8")
    assert ending.state == one.state, log
    assert sorted(re.findall(r"trains (\d)", log)) == ["0", "1", "2", "3"], log
    # With proctrack/linuxproc Slurm signals the workers as well. Each worker ends at its first signal.
    assert sorted(re.findall(r"heard (\w+) (\d)", log)) == [(one.signal, str(rank)) for rank in range(4)], log
    assert ("script heard" in log) == (name == "script"), log


# --- limits, chains, containers and switches; release 22.05 does not tell when a job ends -----------------------------
#: Says on which node each rank ran.
PLACES = """
import os
os.write(1, "trained {RANK} of {WORLD_SIZE} on {SLURMD_NODENAME}\\n".format(**os.environ).encode())
"""
#: Trains until it is asked to stop, and saves for longer than Slurm would wait.
SAVES = """
import os, time
from elastic_run.worker import stop_requested
stop_requested()
os.write(1, b"training\\n")
while not stop_requested():
    time.sleep(0.05)
os.write(1, b"asked\\n")
time.sleep(12)
os.write(1, b"saved\\n")
"""
#: Tells when the job ends, in so many seconds, where Slurm does not: newer releases tell each step.
TELL_END = "export SLURM_JOB_END_TIME=${{SLURM_JOB_END_TIME:-$(($(date +%s) + {seconds}))}}\n"


@pytest.fixture(scope="module")
def switched() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes at two switches."""
    with slurm_cluster(3, switches=["node[0,2]", "node1"]) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_follow_the_switches(switched: SlurmCluster, tmp_path: Path) -> None:
    """The nodes of the first switch have neighbouring ranks, though Slurm lists the other one's node between them."""
    (tmp_path / "places.py").write_text(PLACES, encoding="utf-8")
    code, log = run_batch(switched, tmp_path, "srun elastic-run places.py", "--nodes=3")
    ranks = dict(re.findall(r"trained (\d) of 3 on (\w+)", log))
    assert (code, ranks) == (0, {"0": "node0", "1": "node2", "2": "node1"}), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_save_before_the_time_is_over(switched: SlurmCluster, tmp_path: Path) -> None:
    """With --shutdown-timeout above KillWait (10 s here) stop_requested() is true so much earlier; a line says so."""
    (tmp_path / "saves.py").write_text(SAVES, encoding="utf-8")
    body = (
        f"{TELL_END.format(seconds=30)}"
        "srun elastic-run --shutdown-timeout=20 saves.py\n"
        "(($(date +%s) < SLURM_JOB_END_TIME)) && echo in time"
    )
    code, log = run_batch(switched, tmp_path, body, "--nodes=1", "--ntasks=1", "--time=1")
    assert (code, re.findall("^(?:training|asked|saved|in time)$", log, re.MULTILINE)) == (
        0,
        ["training", "asked", "saved", "in time"],
    ), log
    assert re.search(r"the job's time limit is in \d+ s: stop_requested\(\) is true in the workers", log), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_with_requeue_is_run_again_before_its_time_is_over(switched: SlurmCluster, tmp_path: Path) -> None:
    """Without --signal: the launcher stops the workers in time, and asks Slurm to run the job again."""
    script = (
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then {TELL_END.format(seconds=12)}'
        "exec srun elastic-run --requeue=1 --shutdown-timeout=4 --no-python sleep 600; fi\n"
        "srun elastic-run train.py"
    )
    run_batch(switched, tmp_path, script, "--nodes=1", "--ntasks=1", "--time=1", "--requeue", "--open-mode=append")
    log = tmp_path / "job.log"
    wait_until(lambda: trained(log.read_text(encoding="utf-8")) == ["0 of 1"], deadline=120, what="the second life")
    text = log.read_text(encoding="utf-8")
    assert "stopping the workers, to run the job again" in text, text
    assert text.count("is requeued (1 of 1)") == 1, text


def warn(switched: SlurmCluster, job: Submitted, element: int) -> None:
    """Send SIGTERM to the steps of one job of a chain, as --signal=TERM@120 does."""
    number = switched.run("squeue", "-h", "-j", f"{job.number}_{element}", "-o", "%A").strip()
    switched.run("scancel", "--signal=TERM", f"{number}.0")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_chain_of_jobs_goes_on_from_the_checkpoint(switched: SlurmCluster, tmp_path: Path) -> None:
    """chain.sbatch: the first job is warned, the second one goes on, the third finds the training done."""
    job = Submitted(switched, tmp_path, "slurm/chain.sbatch", ENDLESS)
    job.wait_line("^step 10:")
    warn(switched, job, 1)
    job.wait_line("^resumed at step [1-9]")
    (tmp_path / f"done-{job.number}").touch()
    warn(switched, job, 2)
    job.wait_line("^job 3 of the chain: the training is done$")
    switched.cancel(job.number)
    wait_until(lambda: not switched.run("squeue", "-h"), deadline=LIFE, what="all jobs gone")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_container_reads_the_step_from_its_variables(switched: SlurmCluster, tmp_path: Path) -> None:
    """apptainer.sbatch, with a program in apptainer's place that only runs the command behind the image."""
    stub = tmp_path / "bin" / "apptainer"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/bash\n[[ "$*" == "exec --nv --bind=$PWD image.sif elastic-run "* ]] && shift 4 && exec "$@"\n',
        encoding="utf-8",
    )
    stub.chmod(0o755)
    job = Submitted(
        switched,
        tmp_path,
        "slurm/apptainer.sbatch",
        "--steps=20",
        env={"IMAGE": "image.sif"},
        programs=str(stub.parent),
    )
    assert switched.wait_end(job.number, deadline=LIFE).state == "COMPLETED", job.log
    assert re.search(r"^restart 0: the workers are \[\d+, \d+\]$", job.log, re.MULTILINE), job.log


# --- heterogeneous jobs -----------------------------------------------------------------------------------------------
COMPONENTS = "#SBATCH --nodes=1 --ntasks-per-node=1\n#SBATCH hetjob\n#SBATCH --nodes=2 --ntasks-per-node=1\n"


@pytest.fixture(scope="module")
def backfill() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes whose scheduler knows heterogeneous jobs."""
    with slurm_cluster(3, scheduler="backfill") as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_on_all_components_is_one_job(backfill: SlurmCluster, tmp_path: Path) -> None:
    """Three ranks on the nodes of both components, and the endpoint names all three nodes."""
    code, log = run_batch(backfill, tmp_path, f"{COMPONENTS}srun --het-group=0,1 elastic-run train.py")
    assert (code, trained(log)) == (0, ["0 of 3", "1 of 3", "2 of 3"]), log
    assert "--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=node0:" in log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_on_one_component_says_that_each_task_trains_alone(backfill: SlurmCluster, tmp_path: Path) -> None:
    """The variables of such a step can't be told from those of one component of a larger step."""
    code, log = run_batch(backfill, tmp_path, f"{COMPONENTS}srun --het-group=1 elastic-run train.py")
    assert (code, trained(log)) == (0, ["0 of 1", "0 of 1"]), log
    assert log.count("runs a job of its own: the job is heterogeneous") == 2
