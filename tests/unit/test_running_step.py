"""The Slurm step in which a process runs: the kernel tells it, and variables of another step are left over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_run.cli import request, scheduler_values
from elastic_run.cli.make_config import make_config
from elastic_run.run import parse_args, run_command
from elastic_run.schedulers import slurm_variables as running_step
from elastic_run.schedulers.slurm import find_step, is_left_over
from elastic_run.schedulers.slurm_variables import read_running_step
from tests.support.slurm_variables import complete_from_cluster, task_of

HOST = os.uname().nodename.partition(".")[0]
#: A task of `srun` on two nodes of a job that has ended in the meantime.
STEP = {
    "SLURM_JOB_END_TIME": "9999999999",
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": f"{HOST},b",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
NO_GROUPS = "9:name=systemd:/\n0::/user.slice/user-1000.slice/session-3.scope\n"
V1 = "11:memory:/slurm/uid_1000/job_41/step_0/task_0\n9:name=systemd:/system.slice/slurmd.service\n"
V1_OF_NODE = "4:freezer:/slurm_node0/uid_1000/job_41/step_0\n"
V2 = "0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_0\n"
V2_SLUID = "0::/system.slice/slurmstepd.scope/sJTDZ9GS2XN00/step_0/user/task_0\n"


class Tree:
    """A /proc in a directory: this process, and those above it up to the first one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, *titles: str, groups: str = NO_GROUPS, namespace: str = "pid:[4026531836]") -> str:
        """Write the processes, nearest first, and return the directory."""
        pids = ["self", *(str(900 - place) for place, _ in enumerate(titles)), "1"]
        for pid, parent, title in zip(pids, pids[1:], ["python", *titles], strict=False):
            directory = self.root / pid
            directory.mkdir(parents=True)
            (directory / "cmdline").write_bytes(title.encode() + b"\0-x\0")
            (directory / "stat").write_text(f"7 (a) b (c) S {parent} 7 7 0 -1 0", encoding="utf-8")
        (self.root / "self/cgroup").write_text(groups, encoding="utf-8")
        (self.root / "self/ns").mkdir()
        (self.root / "self/ns/pid").symlink_to(namespace)
        return str(self.root)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """No processes yet, on a machine that is no container."""
    monkeypatch.setattr(running_step, "_CONTAINER_MARKS", (str(tmp_path / "mark"),))
    return Tree(tmp_path / "proc")


@pytest.mark.parametrize(
    ("titles", "groups", "found"),
    [
        (["bash", "slurmstepd: [41.0]"], NO_GROUPS, "41.0"),
        (["slurmstepd: [41.batch]"], NO_GROUPS, "41.batch"),
        (["slurmstepd: [42.0+1]"], NO_GROUPS, "42.0+1"),
        (["slurmstepd: [41.extern stepmgr]"], NO_GROUPS, "41.extern"),
        (["bash [41.0]", "sshd: user", "systemd"], NO_GROUPS, ""),
        ([], NO_GROUPS, ""),  # a daemon: the first process has adopted it
        ([], "", ""),
        (["/usr/sbin/slurmstepd"], NO_GROUPS, None),  # it has no title yet
        (["tmux"], V1, "41.0"),
        (["tmux"], V1_OF_NODE, "41.0"),
        (["tmux"], V2, "41.0"),
        (["tmux"], V2_SLUID, "sJTDZ9GS2XN00.0"),
        (["sshd: user"], V2.replace("step_0", "step_extern"), "41.extern"),
        (["bash"], "0::/user.slice/job_41/step_0\n", ""),  # another program's directories
        (["bash"], "0::/system.slice/slurmd.service\n", ""),
        (["slurmstepd: [41.0]"], V2.replace("41", "7"), "41.0"),
    ],
)
def test_the_step_is_that_of_the_daemon_or_of_the_control_group(
    tree: Tree, titles: list[str], groups: str, found: str | None
) -> None:
    """Slurm's daemon is looked for among all processes above; its control groups keep what left its parent."""
    assert read_running_step(tree.write(*titles, groups=groups)) == found


def test_nothing_is_seen_in_a_container(tree: Tree, tmp_path: Path) -> None:
    """A namespace of processes ends at the container; Docker's and Podman's daemons start others than their caller."""
    assert read_running_step(tree.write("bash", namespace="pid:[4026532208]")) is None
    assert read_running_step(str(tmp_path / "no-proc")) is None
    other = Tree(tmp_path / "other").write("containerd-shim")
    assert read_running_step(other) == ""
    (tmp_path / "mark").touch()
    assert read_running_step(other) is None
    within = Tree(tmp_path / "within").write("bash", groups=V2, namespace="pid:[4026532208]")
    assert read_running_step(within) == "41.0"


def test_hidden_processes_may_be_slurms(tree: Tree) -> None:
    """With hidepid only the user's own processes are there, so that a missing one may be the daemon."""
    root = tree.write("bash", "slurmstepd: [41.0]")
    (Path(root) / "899/cmdline").unlink()
    assert read_running_step(root) is None
    (Path(root) / "self/cgroup").write_text(V1, encoding="utf-8")
    assert read_running_step(root) == "41.0"


def test_the_real_proc_is_read() -> None:
    """A process below one that has the daemon's title, with a shell between them, runs in its step."""
    code = "from elastic_run.schedulers.slurm import read_running_step as read; print(read())"
    for step in ("41.batch", "41.0"):
        command = [*task_of(step), "bash", "-c", f"{sys.executable} -c '{code}'; true"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == step


@pytest.mark.parametrize(
    ("running", "more", "left"),
    [
        ("41.0", {}, False),
        (None, {}, False),
        ("", {}, True),
        ("41.1", {}, True),
        ("40.0", {}, True),
        ("41.extern", {}, True),  # a shell of ssh
        ("40.batch", {}, True),
        ("41.batch", {}, False),  # a task has submitted it, and the job's variables are its own
        ("41.interactive", {"SLURM_STEP_ID": "4294967290"}, False),
        ("41.interactive", {"SLURM_STEP_ID": "-6"}, False),  # Slurm 26.05
        ("41.extern", {"SLURM_STEP_ID": "4294967290"}, True),
        ("42.0+1", {"SLURM_HET_SIZE": "2"}, False),
        ("42.1+1", {"SLURM_HET_SIZE": "2"}, True),
        ("sJTDZ9GS2XN00.0", {"SLURM_JOB_SLUID": "sJTDZ9GS2XN00"}, False),
        ("sJTDZ9GS2XN00.0", {"SLURM_JOB_SLUID": "sJTDZ9GS2XN01"}, True),
        ("", {"SLURM_PROCID": ""}, False),  # of a batch script, or of salloc
        ("40.0", {"SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3"}, False),  # a shell of salloc in a task
    ],
)
def test_variables_of_another_step_are_left_over(
    monkeypatch: pytest.MonkeyPatch, running: str | None, more: dict[str, str], *, left: bool
) -> None:
    """They describe this process only if it runs in their step, as far as that can be seen."""
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: running)
    assert is_left_over({**STEP, **more}) == left
    if left:
        assert find_step({**STEP, **more}, HOST) is None


START = f"SLURM_JOB_ID=41, SLURM_STEP_ID=0, SLURM_STEP_NODELIST={HOST},b and others are left over from a Slurm step in "


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train.py", True),
        ("--nnodes=2 train.py", True),
        ("--nproc-per-node=8 train.py", True),
        ("--standalone train.py", False),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:1 --rdzv-id=a train.py", False),
        ("--nnodes=2 --master-addr=a --node-rank=1 train.py", False),
    ],
)
def test_variables_that_are_left_over_are_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, words: str, *, told: bool
) -> None:
    """One line, and the job is that of a plain shell; a whole command line, as outside of Slurm, needs none."""
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: "")
    args, plain = parse_args(words.split()), parse_args(words.split())
    notices = complete_from_cluster(args, STEP)
    assert [notice.startswith(START) for notice in notices] == [True] * told
    assert all(("this host trains alone" in notice) == ("nnodes" not in words) for notice in notices)
    assert args == plain


def test_a_job_that_is_over_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its end nor --requeue counts in a shell that has its variables."""
    for running, end in (("", 0.0), (None, 9999999999.0)):
        monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda running=running: running)
        args = parse_args(["--standalone", "train.py"])
        asked = request.read_request(args, 1, STEP, found=scheduler_values.complete_from_cluster(args, STEP))
        assert make_config(asked, dict(STEP))[0].node_config.end_time == end


def test_no_other_job_is_requeued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that SIGTERM has stopped asks Slurm for nothing if the variables are another job's."""
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: "")
    monkeypatch.setattr("elastic_run.launch_config.launch_job", lambda *_: 143)
    monkeypatch.setattr("elastic_run.schedulers.actions.requeue_job", lambda *_: pytest.fail("it was asked for"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run_command(["--requeue=5", "train.py"])
    assert ended.value.code == 143
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"elastic-run: {START}") for line in lines] == [True, False]
    assert lines[1] == "elastic-run: --requeue: has no effect outside of a Slurm job"
