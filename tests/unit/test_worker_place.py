"""Which worker a process is, from its variables: one answer for each kind of launcher, one clear line for the rest."""

from __future__ import annotations

import os

import pytest

from elastic_run.schedulers.slurm_variables import step_port
from elastic_run.worker import place
from elastic_run.worker.place import Place, PlaceError, place_from

LAUNCHED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
ELASTIC = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
#: What Slurm 22.05 sets for the last of three tasks on two nodes.
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "node[0-3]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
#: And for a batch script, which is no task of a step.
BATCH = {"SLURM_JOB_ID": "41", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


def test_a_launcher_says_which_worker_it_is() -> None:
    """RANK and its like are taken as they are."""
    assert place_from({**LAUNCHED, **ELASTIC}) == Place(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        launcher="torchrun",
        master_addr="node0",
        master_port=29500,
        node_rank=1,
        nodes=2,
        is_store_served=True,
    )


@pytest.mark.parametrize(
    ("more", "name"),
    [({}, "environment"), (ELASTIC, "torchrun"), ({**ELASTIC, "ELASTIC_RUN_TOKEN": "t"}, "elastic-run")],
)
def test_the_launcher_is_named(more: dict[str, str], name: str) -> None:
    """The three that set RANK are told apart."""
    assert place_from({**LAUNCHED, **more}).launcher == name


def test_only_what_torch_needs_is_needed() -> None:
    """Who sets RANK by hand may leave the local variables out: one worker on the node."""
    place = place_from({name: LAUNCHED[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")})
    assert (place.rank, place.local_rank, place.local_world_size, place.is_store_served) == (5, 0, 1, False)


def test_a_step_of_slurm_says_which_worker_it_is() -> None:
    """A task of srun meets the others on the first node of its step, not of the job."""
    assert place_from(STEP) == Place(
        rank=2,
        world_size=3,
        local_rank=0,
        local_world_size=1,
        launcher="slurm",
        master_addr="node2",
        master_port=step_port(41, 0),
        node_rank=1,
        nodes=2,
    )


def test_a_step_on_one_node_looks_up_no_name() -> None:
    """Tasks of a single node meet on loopback."""
    one = {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"}
    place = place_from({**STEP, **one})
    assert (place.master_addr, place.local_rank, place.local_world_size) == ("127.0.0.1", 2, 3)


def test_a_launcher_inside_slurm_comes_first() -> None:
    """A worker of elastic-run that runs in a step of srun is elastic-run's."""
    assert place_from({**STEP, **LAUNCHED}).rank == 5
    alone = {**STEP, **LAUNCHED, "RANK": "0", "WORLD_SIZE": "1", "SLURM_TASK_PID": "7"}
    assert place_from(alone, pid=8).world_size == 1


@pytest.mark.parametrize(("world_size", "tasks"), [("8", "8"), ("8", "1"), ("1", "1"), ("1", "")])
def test_a_task_may_set_its_own_rank(world_size: str, tasks: str) -> None:
    """A wrapper of a task may number the tasks in its own order, and those of several steps."""
    environment = {**STEP, **LAUNCHED, "RANK": "0", "WORLD_SIZE": world_size, "SLURM_STEP_NUM_TASKS": tasks}
    assert place_from({**environment, "SLURM_TASK_PID": "7"}, pid=7).world_size == int(world_size)


def test_a_step_on_one_node_needs_no_number_of_the_node() -> None:
    """A container may be given the other variables only."""
    one = {**STEP, "SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": ""}
    assert (place_from(one).node_rank, place_from(one).local_world_size) == (0, 3)


def test_a_task_with_the_rank_of_another_shell_is_refused() -> None:
    """Each of three tasks would be rank 0 of 1, and train a model of its own."""
    left_over = {**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1", "SLURM_TASK_PID": "7"}
    told = "RANK=0 and WORLD_SIZE=1 are set, but this process is task 2 of the 3 tasks of a Slurm step: unset RANK"
    with pytest.raises(PlaceError, match=told):
        place_from({**STEP, **left_over}, pid=7)


@pytest.mark.parametrize(
    "more",
    [
        *({}, BATCH, {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, {"WORLD_SIZE": "1"}),
        {**BATCH, "SLURM_STEP_ID": "-5"},  # Slurm 26.05
        {**STEP, "SLURM_STEP_ID": "-5"},  # submitted by a task
        {**STEP, "SLURM_PROCID": "", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": ""},  # docker run -e SLURM_PROCID=$SLURM_PROCID, outside of Slurm
    ],
)
def test_who_was_not_placed_is_alone(more: dict[str, str]) -> None:
    """Plain python is one process, in a batch script and with an address or half of a lone task lying about, too."""
    assert place_from(more) == Place(0, 1, 0, 1, "none")
    assert place_from(more).nodes == 1


@pytest.mark.parametrize(
    ("running", "launcher"), [("42.batch", "none"), ("41.0", "slurm"), ("", "slurm"), (None, "slurm")]
)
def test_a_batch_script_that_a_task_has_submitted_is_alone(running: str | None, launcher: str) -> None:
    """It has all variables of the task's step; only Slurm's daemon tells that it is no task."""
    assert place_from({**STEP, "SLURM_PROCID": "0"}, running_step=running).launcher == launcher


@pytest.mark.parametrize(
    ("more", "port"),
    [
        ({"MASTER_PORT": "4711"}, 4711),
        ({"SLURM_STEP_RESV_PORTS": "12000-12003"}, 12000),
        ({"SLURM_STEP_RESV_PORTS": "12005,12007"}, 12005),
        ({"MASTER_PORT": "4711", "SLURM_STEP_RESV_PORTS": "12000-12003"}, 4711),
        ({"SLURM_STEP_ID": "1"}, step_port(41, 1)),
        ({"SLURM_STEP_RESV_PORTS": "(null)"}, step_port(41, 0)),
    ],
)
def test_the_port_of_a_step(more: dict[str, str], port: int) -> None:
    """MASTER_PORT wins, then a port that Slurm reserved, then one made from the numbers of job and step."""
    assert place_from({**STEP, **more}).master_port == port


def test_an_address_that_was_given_wins() -> None:
    """MASTER_ADDR overrules the first node of the step."""
    assert place_from({**STEP, "MASTER_ADDR": "10.0.0.7"}).master_addr == "10.0.0.7"


@pytest.mark.parametrize(
    ("more", "serves"),
    [
        ({"SLURM_PROCID": "2", "SLURM_NODEID": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, True),
        # srun --distribution=arbitrary: the tasks of the first node are not the first tasks.
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "1"}, False),
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "0"}, True),
        ({"SLURM_PROCID": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, False),
        # A place that was given is that of rank 0, as everywhere.
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "1", "MASTER_ADDR": "node3"}, True),
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "0", "MASTER_ADDR": "node3"}, False),
    ],
)
def test_the_first_task_of_the_first_node_serves_the_store(more: dict[str, str], *, serves: bool) -> None:
    """The workers meet there; it is rank 0 unless the user has arranged the tasks."""
    assert place_from({**STEP, **more}).serves_store == serves


@pytest.mark.parametrize(("more", "serves"), [({"RANK": "0"}, True), ({}, False), ({"RANK": "0", **ELASTIC}, False)])
def test_rank_0_serves_the_store_unless_the_launcher_does(more: dict[str, str], *, serves: bool) -> None:
    """As torch has it."""
    assert place_from({**LAUNCHED, **more}).serves_store == serves


def test_a_step_sets_what_a_launcher_would() -> None:
    """The variables of a place, read again, are the same place."""
    variables = place_from(STEP).variables
    again = place_from(variables)
    assert (again.rank, again.world_size, again.local_rank, again.nodes) == (2, 3, 0, 2)
    assert set(variables) == set(LAUNCHED)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "3"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set, but RANK=3: set all of"),
        ({**LAUNCHED, "MASTER_ADDR": ""}, "MASTER_ADDR is not set, but RANK=5, WORLD_SIZE=8, MASTER_PORT=29500: set"),
        ({"WORLD_SIZE": "8"}, "RANK, MASTER_ADDR, MASTER_PORT are not set, but WORLD_SIZE=8: set"),
        ({**LAUNCHED, "RANK": "8"}, "rank 8 is not below the world size, 8"),
        ({**LAUNCHED, "RANK": "-1"}, "rank -1 is not below the world size, 8"),
        ({**LAUNCHED, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**LAUNCHED, "LOCAL_RANK": "4"}, "local rank 4 is not below the number of local workers, 4"),
        ({**LAUNCHED, "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port from 1 to 65535"),
        ({**LAUNCHED, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (
            {**STEP, "SLURM_STEP_RESV_PORTS": "70000-80000"},
            "SLURM_STEP_RESV_PORTS: '70000-80000' does not begin with a port from 1 to 65535",
        ),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set, but SLURM_JOB_ID=41, SLURM_PROCID=2"),
        ({**STEP, "SLURM_STEP_NODELIST": "node[2-"}, "'node[2-' is no Slurm node list"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, "rank 2 is not below the world size, 2"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": ""},
            "SLURM_STEP_NUM_TASKS is not set, but SLURM_JOB_ID=41, SLURM_PROCID=2, SLURM_LOCALID=0, SLURM_STEP_",
        ),
        (
            {**STEP, "SLURM_PROCID": ""},
            "SLURM_PROCID is not set, but SLURM_JOB_ID=41, SLURM_LOCALID=0, SLURM_STEP_NODELIST=node[2-3], SLURM_",
        ),
        # Each node would have the number and the tasks of the first one.
        ({**STEP, "SLURM_NODEID": ""}, "SLURM_NODEID is not set, but SLURM_JOB_ID=41, SLURM_PROCID=2"),
        ({**STEP, "SLURM_STEP_ID": ""}, "SLURM_STEP_ID is not set, but SLURM_JOB_ID=41, SLURM_PROCID=2"),
        (
            {"SLURM_STEP_NUM_TASKS": "3"},
            "SLURM_STEP_NODELIST, SLURM_NODEID, SLURM_STEP_ID are not set, but SLURM_STEP_NUM_TASKS=3",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"},
            "SLURM_NODEID are not set, but SLURM_STEP_ID=0, SLURM_NTASKS=3: set",
        ),
        # No batch script: its number is 0. A container may be given a few of the variables.
        (
            {**BATCH, "SLURM_PROCID": "1"},
            (
                "SLURM_STEP_NODELIST, SLURM_STEP_ID are not set, but SLURM_JOB_ID=41, SLURM_PROCID=1, SLURM_LOCALID=0, "
                "SLURM_NODEID=0, SLURM_NTASKS=3: set all of SLURM_JOB_ID, SLURM_PROCID, SLURM_LOCALID, "
                "SLURM_STEP_NODELIST, SLURM_NODEID, SLURM_STEP_ID, SLURM_NTASKS or none; srun sets them"
            ),
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_line(environment: dict[str, str], message: str) -> None:
    """A contradiction names the variables, what they are and what is missing."""
    with pytest.raises(PlaceError) as caught:
        place_from(environment)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_launcher_that_names_no_node_has_one() -> None:
    """Without GROUP_RANK and its like, all workers are on one node, and rank 0 serves the store itself."""
    place = place_from({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (place.local_rank, place.local_world_size, place.node_rank, place.nodes) == (0, 1, 0, 1)
    assert not place.is_store_served
    assert not Place(rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="x").is_store_served


@pytest.mark.parametrize(
    ("environment", "launcher", "looks"),
    [(STEP, "none", 1), ({**STEP, **LAUNCHED}, "environment", 0), ({}, "none", 0)],
    ids=["a batch script of a task", "a launcher's worker", "no Slurm"],
)
def test_the_running_step_is_looked_for_where_it_counts(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launcher: str, looks: int
) -> None:
    """A batch script that a task has submitted has the variables of the task's step, and is none; RANK is enough."""
    for name in os.environ:
        if name.startswith("SLURM_") or name in LAUNCHED:
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked: list[str] = []

    def read_running_step() -> str:
        asked.append("/proc")
        return "41.batch"

    monkeypatch.setattr(place, "read_running_step", read_running_step)
    assert (place.find_place().launcher, len(asked)) == (launcher, looks)
