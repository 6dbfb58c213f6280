"""A step of Slurm is believed only where all its variables agree; its launchers must be one job, or say otherwise."""

from __future__ import annotations

import os

import pytest

from elastic_run.cli.slurm_step import check_step
from elastic_run.cluster.slurm import Step, find_shared_step
from elastic_run.errors import UsageError
from elastic_run.run import parse_args
from elastic_run.slurm_variables import step_port

HOST = os.uname().nodename.partition(".")[0]
#: What a task of `srun` on three nodes sees, this host being the second.
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": f"a7,{HOST},c",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
CROWDED = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_TASKS_PER_NODE": "4(x3)"}
ONE_NODE = {
    "SLURM_NNODES": "1",
    "SLURM_STEP_NODELIST": HOST,
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
MEETING = f"--rdzv-backend=c10d --rdzv-endpoint=a7:{step_port(41, 2)} --rdzv-id=41.0"


def test_a_task_knows_its_step() -> None:
    """A task of srun knows the step's nodes, tasks, and a place to meet that the next life of the job doesn't share."""
    step = find_shared_step(STEP, HOST)
    assert step == Step(nodes=("a7", HOST, "c"), task_count=3, port=step_port(41, 2), run_id="41.0")
    assert step.endpoint == f"a7:{step_port(41, 2)}"
    again = find_shared_step({**STEP, "SLURM_RESTART_COUNT": "2"}, f"{HOST}.some.site")
    assert again is not None
    assert again.run_id == "41.2"


NO_STEP = [
    {"SLURM_PROCID": ""},  # a shell of salloc, or a program that a task cleaned the environment for
    {"SLURM_STEP_ID": "", "SLURM_STEP_NODELIST": ""},  # a batch script
    {"SLURM_STEP_NODELIST": "a7,b,c"},  # a container with a name of its own, or another host's variables
    {"SLURM_STEP_NODELIST": "a7,b["},
    {"SLURM_STEP_NUM_TASKS": "three"},
    {"SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"},  # a batch script that a task has submitted
    {"SLURM_TASKS_PER_NODE": "2(x3)"},
    {"SLURM_HET_SIZE": "2"},
    {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"},
]


@pytest.mark.parametrize("more", NO_STEP)
def test_what_is_no_shared_step_is_left_alone(more: dict[str, str]) -> None:
    """Leaked variables, a batch script, a single task, a foreign host and a heterogeneous job refuse nothing."""
    assert find_shared_step({**STEP, **more}, HOST) is None
    check_step(parse_args(["train.py"]), {**STEP, **more})


REFUSED = [
    (
        "train.py",
        {},
        (
            "--nnodes: is 1, but the Slurm step has 3 nodes, and each would train a model of its own: give --nnodes=3 "
            f"{MEETING} for one job, or --standalone for 3 separate jobs"
        ),
    ),
    ("--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py", {}, "--nnodes: is 1, but the Slurm step "),
    ("--nnodes=1 --master-port=29501 train.py", {}, "--nnodes: is 1, but the Slurm step has 3 nodes, "),
    (
        "train.py",
        CROWDED,
        (
            "--nnodes: is 1, but the Slurm step has 12 tasks on its 3 nodes, and each is a launcher with workers of "
            f"its own: give srun --ntasks=3 --ntasks-per-node=1 elastic-run --nnodes=3 {MEETING} for one job, or "
            "--standalone for 12 separate jobs"
        ),
    ),
    (f"--nnodes=3 {MEETING} train.py", CROWDED, "--nnodes: is 3, but the Slurm step has 12 tasks on its 3 nodes, "),
    (
        "train.py",
        ONE_NODE,
        (
            "--nnodes: is 1, but the Slurm step has 4 tasks on this node, and each is a launcher with workers of its "
            "own: give srun --ntasks=1 --ntasks-per-node=1 for one job, or --standalone for 4 separate jobs"
        ),
    ),
    (
        "--nnodes=1:3 train.py",
        {},
        (
            "--rdzv-endpoint: is needed in a Slurm step of 3 tasks, or each launcher would wait for the others at an "
            f"address of its own: give --nnodes=1:3 {MEETING} for one job"
        ),
    ),
]


@pytest.mark.parametrize(("words", "more", "message"), REFUSED)
def test_launchers_that_would_be_strangers_are_refused(words: str, more: dict[str, str], message: str) -> None:
    """Launchers of one step that would each train alone, or share a node, get one line with values to paste."""
    with pytest.raises(UsageError) as caught:
        check_step(parse_args(words.split()), {**STEP, **more})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("--standalone train.py", {}),
        ("--standalone train.py", CROWDED),
        ("--standalone --nproc-per-node=4 train.py", ONE_NODE),
        (f"--nnodes=3 {MEETING} train.py", {}),
        (f"--nnodes=2 {MEETING} train.py", {}),  # one node is a spare
        (f"--nnodes=1:3 {MEETING} train.py", {}),
        (f"--nnodes=12 {MEETING} train.py", CROWDED),  # an agent per task
        (f"--nnodes=4 {MEETING} train.py", ONE_NODE),
        ("--nnodes=3 --node-rank=1 --master-addr=a7 train.py", {}),
        ("--nnodes=3 --master-addr=a7 --master-port=29500 train.py", {}),
        ("--rdzv-backend=of-a-plug-in train.py", {}),
        ("train.py", {"TORCHELASTIC_RUN_ID": "outer"}),
    ],
)
def test_a_step_that_is_one_job_or_says_that_it_is_none_passes(words: str, more: dict[str, str]) -> None:
    """Flags of several nodes that agree, --standalone, a plug-in and a launcher inside a worker pass untouched."""
    check_step(parse_args(words.split()), {**STEP, **more})
