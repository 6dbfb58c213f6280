"""A step of Slurm is believed only where all its variables agree."""

from __future__ import annotations

import os
import re

import pytest

from elastic_run.cli import make_config as config
from elastic_run.run import parse_args
from elastic_run.schedulers.slurm import Step, StepError, find_step
from tests.support.slurm_variables import HOST, ONE_NODE, PLACE, PORT, STEP, TASKS_PER_NODE, complete_from_cluster

TYPE_CHECKING = False


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, and does not show the processes of Slurm's daemon."""
    monkeypatch.setattr(config, "_DRIVERS", ())
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: None)


def test_a_task_knows_its_step() -> None:
    """A task of srun knows the step's nodes, tasks, and a place to meet that the next life of the job doesn't share."""
    step = find_step(STEP, HOST)
    assert step == Step(nodes=("a7", HOST, "c"), node_rank=1, task_count=3, port=PORT, run_id="41.2.0")
    assert step.endpoint == PLACE
    again = find_step({**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_RESV_PORTS": "12000-12003"}, f"{HOST}.some.site")
    assert again is not None
    assert (again.run_id, again.port) == ("41.2.2", 12000)


@pytest.mark.parametrize(
    ("address", "pattern", "location"),
    [
        ("s0.s4.host", "switch.switch.node", "s0.s4/0000001"),
        ("s0.s4.host.domain", "switch.switch.node", "s0.s4/0000001"),
        ("host", "node", ""),
        ("", "switch.node", ""),
        (".host", "switch.node", ""),
    ],
)
def test_the_switches_of_a_node_are_its_location(address: str, pattern: str, location: str) -> None:
    """SLURM_TOPOLOGY_ADDR orders the ranks, and nodes of one switch keep Slurm's order."""
    more = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    step = find_step({**STEP, **more}, HOST)
    assert step is not None
    assert step.location == location


def test_a_static_job_has_the_ranks_of_the_list_also_where_switches_are_known() -> None:
    """There is no coordinator that could give other ranks: without this each node would have rank 0."""
    args = parse_args(["--master-addr=a7", "--master-port=29500", "train.py"])
    complete_from_cluster(
        args, {**STEP, "SLURM_TOPOLOGY_ADDR": "s1.node", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    )
    assert args.node_rank == 1


@pytest.mark.parametrize(
    "words",
    [
        "--rdzv-backend=etcd-v3 --rdzv-endpoint=localhost:2379 --rdzv-id=a",  # perhaps a proxy on each node
        "--rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-endpoint=localhost:/shared/store --rdzv-id=a",
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:1,a7:1 --rdzv-id=a",
        "--rdzv-backend=c10d --rdzv-endpoint=c:29400 --rdzv-id=a",
        "--rdzv-backend=c10d --rdzv-endpoint=[:1 --rdzv-id=a",  # another check names it
        "--master-addr=c --master-port=1 --node-rank=1",
        "--master-addr=elsewhere --master-port=1",
    ],
)
def test_a_place_where_the_nodes_may_meet_is_taken(words: str) -> None:
    """Only a place that can't be right is refused: any node may serve the store, and another machine, too."""
    args = parse_args([*words.split(), "train.py"])
    complete_from_cluster(args, STEP)
    assert args.nnodes == "3"


def test_of_many_nodes_three_may_serve_the_store() -> None:
    """The loss of one or two nodes, whichever they are, ends no job."""
    numbers = ("SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS")
    counts = dict.fromkeys(numbers, "201")
    many = {"SLURM_STEP_NODELIST": f"a[1-200],{HOST}", **counts}
    step = find_step({**STEP, **many}, HOST)
    assert step is not None
    assert (step.endpoint, step.node_rank) == (f"a1:{PORT},a2:{PORT},a3:{PORT}", 200)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"SLURM_STEP_NODELIST": "a7,b,c"}, f"this host, {os.uname().nodename}, is none of the step's nodes, a7,b,c"),
        ({"SLURM_STEP_NODELIST": "a7,b["}, "'a7,b[' is no Slurm node list, "),
        ({"SLURM_STEP_NUM_TASKS": "three"}, "SLURM_STEP_NUM_TASKS='three' is not a number"),
        ({"SLURM_JOB_ID": "forty-one"}, "SLURM_JOB_ID='forty-one' is not a number"),
        # A batch script of as many nodes, which a task of another job has submitted.
        (
            {"SLURM_JOB_NODELIST": f"{HOST},c,d"},
            f"the step's nodes, a7,{HOST},c, are not all among the job's nodes, {HOST},c,d",
        ),
        ({"SLURM_HET_SIZE": "2"}, "the job is heterogeneous, and Slurm's variables name the nodes of one component "),
        ({"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, "the job is heterogeneous, "),
        ({"SLURM_HET_SIZE": "9" * 12}, "the job is heterogeneous, "),
    ],
)
def test_a_task_of_several_whose_step_is_of_no_use_is_told_that_it_trains_alone(
    more: dict[str, str], reason: str
) -> None:
    """A container with a host name of its own, a heterogeneous job: N separate models, but not silently."""
    environ = {**STEP, **more}
    with pytest.raises(StepError, match=re.escape(reason)):
        find_step(environ, os.uname().nodename)
    args, before = parse_args(["train.py"]), parse_args(["train.py"])
    (line,) = complete_from_cluster(args, environ)
    assert args == before
    step = f"{environ['SLURM_JOB_ID']}.2"
    assert line.startswith(f"task 1 of the Slurm step {step} runs a job of its own: {reason}")
    assert complete_from_cluster(parse_args(["--standalone", "train.py"]), environ) == []
    assert complete_from_cluster(parse_args(["--nnodes=3", "--master-addr=a7", "train.py"]), environ) == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"SLURM_STEP_NUM_NODES": "2"}, f"SLURM_STEP_NODELIST=a7,{HOST},c does not have the 3 tasks and 2 nodes of "),
        ({"SLURM_STEP_NUM_TASKS": "2"}, f"SLURM_STEP_NODELIST=a7,{HOST},c does not have the 2 tasks and 3 nodes of "),
        ({"SLURM_STEP_RESV_PORTS": "70000-80000"}, "SLURM_STEP_RESV_PORTS: '70000-80000' does not begin with a port "),
        ({"SLURM_STEP_RESV_PORTS": "any"}, "SLURM_STEP_RESV_PORTS: 'any' does not "),
    ],
)
def test_variables_of_a_step_that_contradict_each_other_are_told(more: dict[str, str], reason: str) -> None:
    """Slurm sets no such numbers together, and nothing follows from them."""
    environ = {**STEP, **more}
    with pytest.raises(StepError, match=f"^{re.escape(reason)}"):
        find_step(environ, HOST)
    (line,) = complete_from_cluster(parse_args(["train.py"]), environ)
    assert line.startswith(f"task 1 of the Slurm step 41.2 runs a job of its own: {reason}")


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "3"},
        {"SLURM_JOB_NUM_NODES": "few"},
        {"SLURM_STEP_RESV_PORTS": "70000"},
    ],
)
def test_the_only_task_on_one_node_is_alone_whatever_other_variables_say(more: dict[str, str]) -> None:
    """Nobody is to be met, and a job that would have run is not refused."""
    alone = {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", **dict.fromkeys(TASKS_PER_NODE, "1"), "SLURM_PROCID": "0"}
    args = parse_args(["train.py"])
    complete_from_cluster(args, {**STEP, **alone, **more})
    assert args.nnodes == "1:1"


@pytest.mark.parametrize("node_id", ["1", "", "0"])
def test_the_node_rank_is_the_place_of_this_host(node_id: str) -> None:
    """Through ssh all nodes get the number of one of them; the host's name tells which node this is."""
    args = parse_args(["train.py"])
    assert complete_from_cluster(args, {**STEP, "SLURM_NODEID": node_id}) == []
    assert args.node_rank == 1


def test_a_node_that_slurm_knows_by_another_name_than_the_host_is_of_the_step() -> None:
    """NodeName counts where Slurm started this process or its parent; through ssh the variable proves nothing."""
    known = {**STEP, "SLURM_STEP_NODELIST": "a7,b,c", "SLURMD_NODENAME": "c"}
    for pid in (os.getpid(), os.getppid()):
        step = find_step({**known, "SLURM_TASK_PID": str(pid)}, "some-container")
        assert step is not None
        assert step.node_rank == 2
    for more in ({}, {"SLURM_TASK_PID": "1"}, {"SLURM_TASK_PID": str(os.getpid()), "SLURMD_NODENAME": "d"}):
        with pytest.raises(StepError, match="is none of the step's nodes"):
            find_step({**known, **more}, "some-container")
