"""srun and the shortest script on a real Slurm: launchers of one step are one job, are refused, or say --standalone."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.slurm import SlurmCluster, slurm_cluster
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[3]
#: The shortest script, which says as which worker it ran.
SCRIPT = """
import os
os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""
#: All three nodes train until the agent of the first one is killed; then the other two end well.
FIRST_DIES = """
import os, signal, time
if os.environ["WORLD_SIZE"] == "2":
    os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
elif os.environ["WORLD_SIZE"] == "3":
    if os.environ["SLURM_NODEID"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
else:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes, for all tests here: none of them breaks it."""
    with slurm_cluster(3) as cluster:
        yield cluster


def run_batch(slurm: SlurmCluster, directory: Path, body: str, *options: str) -> tuple[int, str]:
    """Run a batch script whose workers say that they train."""
    return slurm.run_script(directory, body, *options, script=SCRIPT)


def trained(log: str) -> list[str]:
    """Return the workers that have run, as `RANK of WORLD_SIZE`."""
    return sorted(re.findall(r"trained (\d+ of \d+)", log))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_shortest_script_is_one_job_on_all_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun elastic-run train.py` on 3 nodes trains 3 ranks, by node; one line says what was derived."""
    code, log = run_batch(slurm, tmp_path, "srun elastic-run train.py", "--nodes=3")
    assert (code, trained(log)) == (0, ["0 of 3", "1 of 3", "2 of 3"]), log
    place = re.search(
        r"from the Slurm step: --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=(\S+) --rdzv-id=\d+\.0\.0"
        r"(?: --nproc-per-node=\d+)?$",  # on a machine with GPUs
        log,
        re.MULTILINE,
    )
    assert place is not None, log
    assert re.fullmatch(r"node0:(\d+),node1:\1,node2:\1", place[1])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("variables", "world"), [("", 3), ("-u SLURMD_NODENAME", 1)])
def test_hosts_with_names_of_their_own_are_one_job_or_told(
    slurm: SlurmCluster, tmp_path: Path, variables: str, world: int
) -> None:
    """In a container with another host name Slurm's name of the node counts; without it three launchers say so."""
    box = f"hostname box; exec env {variables} elastic-run train.py"
    code, log = run_batch(slurm, tmp_path, f"srun unshare --uts bash -c '{box}'", "--nodes=3")
    ranks = [f"{rank} of {world}" for rank in range(world)] * (3 // world)
    assert (code, trained(log)) == (0, ranks), log
    told = re.findall(r"task (\d) of the Slurm step \d+\.0 runs a job of its own: this host, box, is none of the", log)
    assert sorted(told) == ([] if world == 3 else ["0", "1", "2"]), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_steps_of_one_allocation_are_two_jobs(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Steps that run at once on the same nodes, with two workers each, do not meet."""
    step = "srun --overlap --ntasks=3 elastic-run --nproc-per-node=2 train.py &"
    code, log = run_batch(slurm, tmp_path, f"{step}\n{step}\nwait", "--nodes=3", "--ntasks-per-node=1")
    assert (code, trained(log)) == (0, sorted([f"{rank} of 6" for rank in range(6)] * 2)), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_in_a_larger_allocation_has_the_nodes_of_the_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun --nodes=2` in an allocation of 3 nodes is a job of 2."""
    code, log = run_batch(slurm, tmp_path, "srun --nodes=2 --ntasks=2 elastic-run train.py", "--nodes=3")
    assert (code, trained(log)) == (0, ["0 of 2", "1 of 2"]), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_that_keeps_the_variables_of_the_job_has_the_nodes_of_the_step(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """With `srun --preserve-env` SLURM_NNODES is 3 in a step of 2 nodes."""
    body = "srun --preserve-env --nodes=2 --ntasks=2 elastic-run train.py"
    code, log = run_batch(slurm, tmp_path, body, "--nodes=3", "--ntasks-per-node=1")
    assert (code, trained(log)) == (0, ["0 of 2", "1 of 2"]), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_whose_variables_contradict_each_other_is_told(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Each launcher says that it runs a job of its own, why, and which flags make one job of all tasks."""
    edit = "SLURM_STEP_NODELIST=node[0-1,3]"
    code, log = run_batch(slurm, tmp_path, f"srun env {edit} elastic-run train.py", "--nodes=3")
    assert (code, trained(log)) == (0, ["0 of 1"] * 3), log
    assert log.count("runs a job of its own: the step's nodes, node[0-1,3], are not all among the job's nodes") == 3, (
        log
    )
    assert log.count("for one job of all tasks, give each of them --nnodes, ") == 3, log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_order_of_tasks_is_not_that_of_the_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With --distribution=arbitrary the first task is on node2; ranks follow SLURM_NODEID, which is node2's place."""
    body = "srun --distribution=arbitrary --nodelist=node2,node0,node1 --ntasks=3 bash -c '{}'".format(
        'echo "$SLURM_PROCID is on $SLURM_NODEID"; exec elastic-run --no-python bash -c '
        '"echo trained \\$RANK of \\$WORLD_SIZE on \\$SLURM_NODEID by \\$SLURM_PROCID"'
    )
    code, log = run_batch(slurm, tmp_path, body, "--nodes=3", "--ntasks-per-node=1")
    assert code == 0, log
    assert sorted(re.findall(r"trained .+", log)) == [
        "trained 0 of 3 on 0 by 1",
        "trained 1 of 3 on 1 by 2",
        "trained 2 of 3 on 2 by 0",
    ], log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_batch_script_like_the_step_that_submitted_it_is_no_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two nodes and tasks, as the step has; without srun it is one launcher, which is told of the other node."""
    inner = "sbatch --wait --nodes=2 --ntasks=2 --output=inner.log --wrap 'elastic-run train.py'"
    body = f'srun --nodes=2 --ntasks=2 bash -c "[ \\$SLURM_PROCID = 1 ] || exit 0; {inner}"'
    code, log = run_batch(slurm, tmp_path, body, "--nodes=2", "--ntasks=2", "--overcommit", "--ntasks-per-node=1")
    inner_log = (tmp_path / "inner.log").read_text(encoding="utf-8")
    assert (code, trained(inner_log)) == (0, ["0 of 1"]), log + inner_log
    assert "this Slurm job has 1 other node, which a launcher that is started without srun doesn't use" in inner_log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_loss_of_the_launcher_on_the_first_node_does_not_end_an_elastic_job(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """--nnodes=1:3 alone: the first node served the store, and the others go on at the next endpoint."""
    (tmp_path / "die.py").write_text(FIRST_DIES, encoding="utf-8")
    body = "srun --kill-on-bad-exit=0 --wait=0 elastic-run --nnodes=1:3 --rdzv-conf=keep_alive_interval=1 die.py"
    _, log = run_batch(slurm, tmp_path, body, "--nodes=3")
    assert trained(log) == ["0 of 2", "1 of 2"], log


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [1, 2])
def test_four_tasks_per_node_are_refused_with_the_command_for_one(
    slurm: SlurmCluster, tmp_path: Path, nodes: int
) -> None:
    """Four launchers on each node train nothing and end with 2; the command that the line names starts one per node."""
    options = (f"--nodes={nodes}", f"--ntasks={4 * nodes}", "--ntasks-per-node=4")
    code, log = run_batch(slurm, tmp_path, "srun elastic-run --nproc-per-node=4 train.py", *options)
    assert (code, trained(log)) == (2, [])
    mend = re.search(r"give (srun .+) for one job, or --standalone for \d separate jobs$", log, re.MULTILINE)
    assert mend is not None, log
    code, log = run_batch(slurm, tmp_path, f"{mend[1]} elastic-run --nproc-per-node=2 train.py", *options)
    assert (code, trained(log)) == (0, [f"{rank} of {2 * nodes}" for rank in range(2 * nodes)]), log


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("body", "workers"),
    [
        ("srun --nodes=1 --ntasks=1 elastic-run train.py", ["0 of 1"]),
        ("srun --nodes=1 --ntasks=1 bash -c 'elastic-run --nproc-per-node=2 train.py'", ["0 of 2", "1 of 2"]),
        ("srun --nodes=1 --ntasks=4 elastic-run --standalone train.py", ["0 of 1"] * 4),
        ("srun --ntasks-per-node=1 --ntasks=3 elastic-run --standalone train.py", ["0 of 1"] * 3),
        ("elastic-run train.py", ["0 of 1"]),
        (
            (
                'srun --ntasks=3 --ntasks-per-node=1 bash -c "hostname | grep -q node0 || exit 0; '
                "sbatch --wait --nodes=1 --ntasks=1 --nodelist=node2 --output=job.log --open-mode=append "
                "--wrap 'elastic-run train.py'\""
            ),
            ["0 of 1"],
        ),
        (
            "srun --ntasks=3 --ntasks-per-node=1 elastic-run --standalone --no-python bash -c 'elastic-run train.py'",
            ["0 of 1"] * 3,
        ),
    ],
    ids=["one-task", "shell", "standalone-tasks", "standalone-nodes", "batch", "nested-sbatch", "inside-a-worker"],
)
def test_what_means_one_job_runs(slurm: SlurmCluster, tmp_path: Path, body: str, workers: list[str]) -> None:
    """A single task, --standalone, a batch script, also one submitted by a task, and a worker's own launcher run."""
    code, log = run_batch(slurm, tmp_path, body, "--nodes=3", "--ntasks=6")
    assert (code, trained(log)) == (0, workers), log


#: In its first life it is stopped; in the second one it ends.
TWO_LIVES = """
import os, time
life = os.environ.get("SLURM_RESTART_COUNT", "0")
os.write(1, "life {} rank {RANK}\\n".format(life, **os.environ).encode())
if life == "0":
    time.sleep(600)
"""


def start_two_lives(slurm: SlurmCluster, directory: Path, *options: str) -> int:
    """Submit a job of two nodes with --requeue=1, wait until its workers run, and return its number."""
    (directory / "train.py").write_text(TWO_LIVES, encoding="utf-8")
    script = directory / "job.sbatch"
    script.write_text("#!/bin/bash\nexec srun elastic-run --requeue=1 train.py\n", encoding="utf-8")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": programs, "PYTHONPATH": str(ROOT)}
    options = ("--output=job.log", "--open-mode=append", "--nodes=2", *options)
    job = slurm.submit(*options, script, env=env, cwd=directory)
    wait_until(lambda: read_log(directory).count("life 0 rank") == 2, what="the first life")
    return job


def read_log(directory: Path) -> str:
    """Return what a job has written so far."""
    log = directory / "job.log"
    return log.read_text(encoding="utf-8") if log.exists() else ""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_warned_job_is_requeued_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    """SIGTERM to the steps, as --signal=TERM@120 sends it: one launcher requeues the job, and its second life ends."""
    job = start_two_lives(slurm, tmp_path, "--requeue")
    slurm.run("scancel", "--signal=TERM", str(job))
    assert slurm.wait_end(job, count=2, deadline=120).state == "COMPLETED", read_log(tmp_path)
    log = read_log(tmp_path)
    assert log.count(f"the Slurm job {job} is requeued (1 of 1)") == 1, log
    assert sorted(re.findall(r"life (\d rank \d)", log)) == ["0 rank 0", "0 rank 1", "1 rank 0", "1 rank 1"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_cancelled_job_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Whoever cancels a job means it."""
    job = start_two_lives(slurm, tmp_path, "--requeue")
    slurm.cancel(job)
    assert slurm.wait_end(job).state == "CANCELLED"
    slurm.wait_cleared(job)
    log = read_log(tmp_path)
    assert f"the Slurm job {job} is not requeued: Slurm says that it is " in log, log
    assert len(slurm.endings(job)) == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_that_may_not_be_requeued_says_so(slurm: SlurmCluster, tmp_path: Path) -> None:
    """--no-requeue of sbatch wins; the exit code tells the batch script that another run is wanted."""
    job = start_two_lives(slurm, tmp_path, "--no-requeue")
    slurm.run("scancel", "--signal=TERM", str(job))
    ending = slurm.wait_end(job)
    assert (ending.state, ending.exit_code) == ("FAILED", 209), read_log(tmp_path)
    told = f"the Slurm job {job} is not requeued: its submission does not allow that (sbatch --requeue does)"
    assert told in read_log(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_command_in_the_shell_of_an_allocation_runs(slurm: SlurmCluster, tmp_path: Path) -> None:
    """In `srun --pty bash` on an allocation of 2 nodes, where each node has a shell, the typed command is one job."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    typed = "test $SLURM_PROCID = 0 || exit 0; elastic-run train.py; true"
    shell = f"salloc --quiet --nodes=2 srun --pty bash -c '{typed}'"
    env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "PYTHONPATH": str(ROOT)}
    log = slurm.run("script", "--quiet", "--return", "--command", shell, "/dev/null", env=env, cwd=tmp_path)
    assert trained(log) == ["0 of 1"], log


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("typed", "workers", "told"),
    [
        ("elastic-run train.py", ["0 of 1"], "this host, hub, is none of this Slurm job's nodes, node[0-1], and the "),
        ("srun --ntasks-per-node=1 elastic-run train.py", ["0 of 2", "1 of 2"], "from the Slurm step: --nnodes=2 "),
    ],
    ids=["typed", "by-srun"],
)
def test_the_shell_of_salloc_on_the_login_node(
    slurm: SlurmCluster, tmp_path: Path, typed: str, workers: list[str], told: str
) -> None:
    """A command runs where it was typed, and a line says so; the command of that line runs on the nodes."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    env = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "PYTHONPATH": str(ROOT)}
    log = slurm.run("salloc", "--quiet", "--nodes=2", "bash", "-c", f"{typed} 2>&1", env=env, cwd=tmp_path)
    assert trained(log) == workers, log
    assert f"elastic-run: {told}" in log


# --- the doctor, health checks and exclusions: one node goes, with its reason -----------------------------------------
#: The worker of the first node finds a sick GPU as long as its node is in the job.
SICK = """
import os, sys, time
if os.environ["WORLD_SIZE"] == "3":
    if os.environ["SLURM_NODEID"] == "0":
        sys.exit(int(os.environ.get("SICK_CODE", "0")))
    time.sleep(600 if "SICK_CODE" in os.environ else 0)
os.write(1, "trained {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""
#: The tasks of other nodes go on if one ends; the last line is the exit code of each task's launcher.
STEP_OF_ALL = (
    "srun --kill-on-bad-exit=0 --wait=0 bash -c 'elastic-run {flags} train.py; echo ended $SLURM_NODEID with $?'"
)


def run_sick(slurm: SlurmCluster, directory: Path, body: str) -> str:
    """Run a batch script on three nodes, the first of which may be sick; return what it has written."""
    return slurm.run_script(directory, body, "--nodes=3", "--ntasks-per-node=1", script=SICK)[1]


def read_ends(log: str) -> list[str]:
    """Return each launcher as `NODE with CODE`."""
    return sorted(re.findall(r"ended (\d+ with \d+)", log))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_doctor_needs_no_arguments_in_a_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`srun elastic-run doctor` examines all nodes of the step and prints one report."""
    log = run_sick(slurm, tmp_path, "srun elastic-run doctor; echo code $?")
    assert len(re.findall(r"elastic-run doctor on node\d, node\d, node\d\n", log)) == 1, log
    assert "all-reduce of 4 MB" in log, log
    assert log.count("are printed by the doctor on") == 2
    assert log.endswith("code 0\n"), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_exit_code_takes_the_first_node_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The node that serves the store ends with 211 and the line for scontrol; the other two train on."""
    step = STEP_OF_ALL.format(flags="--nnodes=2:3 --exclude-exit-codes=77")
    log = run_sick(slurm, tmp_path, f"export SICK_CODE=77\n{step}")
    assert read_ends(log) == [f"0 with {contract.EXIT_EXCLUDED}", "1 with 0", "2 with 0"], log
    assert sorted(re.findall(r"trained (\d of 2)", log)) == ["0 of 2", "1 of 2"], log
    assert re.search(r"scontrol update nodename=node\d state=drain reason='elastic-run: exit code 77 is", log), log


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_failed_check_takes_one_node_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A node of the step that is unhealthy from the beginning ends with 210; the others begin without it."""
    others_wait = "until grep -q 'waiting: 2/3' job.log; do sleep 0.1; done"
    check = f"#!/bin/sh\ntest $SLURM_NODEID = 1 || exit 0\n{others_wait}\necho GPU 3 is lost; exit 1\n"
    (tmp_path / "check").write_text(check, encoding="utf-8")
    (tmp_path / "check").chmod(0o755)
    step = STEP_OF_ALL.format(flags="--nnodes=2:3 --rdzv-conf=last_call_timeout=16 --health-check=./check")
    log = run_sick(slurm, tmp_path, step)
    assert read_ends(log) == ["0 with 0", f"1 with {contract.EXIT_UNHEALTHY}", "2 with 0"], log
    assert sorted(re.findall(r"trained (\d of 2)", log)) == ["0 of 2", "1 of 2"], log
    assert "unhealthy: the health check ended with exit code 1: GPU 3 is lost" in log, log
