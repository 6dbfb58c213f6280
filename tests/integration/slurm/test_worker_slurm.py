"""`srun python` on a real Slurm: tasks find each other by Slurm's variables alone."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from ClusterShell.NodeSet import NodeSet

from elastic_run.schedulers.slurm_variables import parse_nodelist
from tests.support.slurm import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

# Several tasks import torch at once, on the machine's few processors.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sys
import elastic_run.worker as worker
context = worker.init_distributed(timeout=60)
words = {
    "rank": context.rank, "world_size": context.world_size, "local_rank": context.local_rank,
    "local_world_size": context.local_world_size, "launcher": context.launcher, "host": os.uname().nodename,
    "mean": worker.reduce_mean(context.rank), "variables": [os.environ.get("RANK"), os.environ.get("MASTER_ADDR")],
}
name = f"{os.environ.get('SLURM_STEP_ID', 'batch')}.{context.rank}.json"
with open(os.path.join(sys.argv[1], name), "w") as file:
    json.dump(words, file)
"""
#: Says why it can't join.
REFUSED = """
from elastic_run.worker import PlaceError, init_distributed
try:
    init_distributed(timeout=60)
except PlaceError as error:
    raise SystemExit(f"refused: {error}") from None
"""
LIFE = 150.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes, for all tests here: none of them breaks it."""
    with slurm_cluster(2) as cluster:
        yield cluster


def run_batch(slurm: SlurmCluster, directory: Path, body: str, *options: str) -> dict[str, dict[str, Any]]:
    """Run a batch script to its end, and return what its tasks have said, by step and rank."""
    (directory / "train.py").write_text(SCRIPT, encoding="utf-8")
    ending = slurm.wait_end(
        slurm.submit_script(directory, f"set -e\n{body}", *options, env={"OUT": str(directory)}), deadline=LIFE
    )
    log = (directory / "job.log").read_text(encoding="utf-8")
    assert ending.state == "COMPLETED", log
    assert "Traceback" not in log
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))}


def test_tasks_of_srun_find_each_other(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Three tasks on two nodes are three ranks, who know their places and are placed for libraries too."""
    words = run_batch(slurm, tmp_path, 'srun python train.py "$OUT"', "--nodes=2", "--ntasks=3")
    places = [("node0", 0, 2), ("node0", 1, 2), ("node1", 0, 1)]
    assert [words[f"0.{rank}"] for rank in range(3)] == [
        {
            "rank": rank,
            "world_size": 3,
            "local_rank": local_rank,
            "local_world_size": local_world_size,
            "launcher": "slurm",
            "host": host,
            "mean": 1.0,
            "variables": [str(rank), "node0"],
        }
        for rank, (host, local_rank, local_world_size) in enumerate(places)
    ]


def test_the_first_task_need_not_be_on_the_first_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With --distribution=arbitrary rank 0 is on node1, and the workers meet on node0 all the same."""
    body = 'srun --distribution=arbitrary --nodelist=node1,node0 --ntasks=2 python train.py "$OUT"'
    words = run_batch(slurm, tmp_path, body, "--nodes=2", "--ntasks-per-node=1")
    assert [(words[f"0.{rank}"]["host"], words[f"0.{rank}"]["mean"]) for rank in range(2)] == [
        ("node1", 0.5),
        ("node0", 0.5),
    ]


def test_two_steps_side_by_side_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Steps of one job on the same node, at the same time, are groups of their own."""
    body = """
    srun --ntasks=2 --nodes=1 --exact python train.py "$OUT" & first=$!
    srun --ntasks=2 --nodes=1 --exact python train.py "$OUT" & second=$!
    wait $first
    wait $second
    """
    words = run_batch(slurm, tmp_path, body, "--nodes=1", "--ntasks=4")
    assert sorted(words) == ["0.0", "0.1", "1.0", "1.1"]
    assert {(word["world_size"], word["mean"], word["variables"][1]) for word in words.values()} == {
        (2, 0.5, "127.0.0.1")
    }


def test_a_batch_script_is_one_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A python that the batch script starts without srun is alone, whatever number of tasks the job has."""
    words = run_batch(slurm, tmp_path, 'python train.py "$OUT"', "--nodes=2", "--ntasks=3")
    assert [(word["rank"], word["world_size"], word["launcher"]) for word in words.values()] == [(0, 1, "none")]


def test_a_task_that_lacks_a_variable_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As in a container that gets some of the variables: no task of three trains a model of its own."""
    (tmp_path / "refused.py").write_text(REFUSED, encoding="utf-8")
    names = "SLURM_PROCID SLURM_STEP_ID SLURM_JOB_ID SLURM_LOCALID SLURM_STEP_NODELIST SLURM_NODEID"
    step = "srun --kill-on-bad-exit=0 --wait=0 env -u $name python refused.py"
    run_batch(slurm, tmp_path, f"for name in {names}; do ! {step}; done", "--nodes=2", "--ntasks=3")
    log = (tmp_path / "job.log").read_text(encoding="utf-8")
    told = [line.partition(": ")[2] for line in log.splitlines() if line.startswith("refused: ")]
    for name in names.split():
        assert sum(line.startswith(f"{name} is not set, but SLURM_") for line in told) == 3, log
    assert len(told) == 3 * len(names.split()), log


def test_a_batch_script_that_a_task_has_submitted_is_one_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Variables of the task's step, of two tasks, are left in it; it waited for the other task."""
    inner = f"sbatch --wait --nodes=1 --ntasks=1 --output=inner.log --wrap 'python train.py {tmp_path}'"
    body = f'srun --ntasks=2 bash -c "[ \\$SLURM_PROCID = 1 ] || exit 0; {inner}"'
    words = run_batch(slurm, tmp_path, body, "--nodes=2", "--ntasks-per-node=1")
    assert [(word["rank"], word["world_size"], word["launcher"]) for word in words.values()] == [(0, 1, "none")]


def test_elastic_run_in_a_step_comes_first(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The workers of an elastic-run that srun starts are elastic-run's, not Slurm's."""
    body = 'srun --ntasks=1 python -m elastic_run --standalone --nproc-per-node=2 train.py "$OUT"'
    words = run_batch(slurm, tmp_path, body, "--nodes=1", "--ntasks=1")
    assert [(word["rank"], word["world_size"], word["launcher"]) for word in words.values()] == [
        (0, 2, "elastic-run"),
        (1, 2, "elastic-run"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a,b", "a[1-3]", "a[01-03,7],b[1-2]-x[3,5],c", "n[098-101]", "n[8-11]", "r[1-2]c[1-2]n[0-1]", "n[007]"),
        *(
            "gpu-[1,3],login-1",
            "b[2-30],b[1-2]",
            "a[1-2]b[3-4],c5d[06-11]",
            "a[1-2]b[3-4]c[1]",
            "n[3,1,2,1]",
            "n[9-011]",
        ),
        *("a[1-2]b[1-2]c[1-3]d[1-2]", "[1-2]", "r[1-2]-[01-03]", "a[1-2],a[1-2]"),
    ],
)
def test_node_lists_are_read_as_scontrol_reads_them(slurm: SlurmCluster, text: str) -> None:
    """Slurm's own program names the same nodes, in the same order."""
    assert slurm.run("scontrol", "show", "hostnames", text).split() == list(parse_nodelist(text))


def write_random_list(random: Random) -> str:
    """Return a list of one to three names, with up to two brackets each, as Slurm writes them.

    Numbers rise, and no digit stands before a bracket: ClusterShell takes it for a part of the first number.
    """
    return ",".join(_write_name(random) for _ in range(random.randint(1, 3)))


def _write_name(random: Random) -> str:
    count = random.choice([0, 1, 1, 1, 1, 2])
    brackets = [f"[{_write_ranges(random)}]" for _ in range(count)]
    return random.choice("abcxyz") + random.choice(["", "1n", "-gpu", "07-n"]) + "x".join(brackets)


def _write_ranges(random: Random) -> str:
    width, ranges, first = random.choice([0, 0, 2, 3, 5]), [], random.choice([0, 1, 8, 98])
    for _ in range(random.randint(1, 3)):
        last = first + random.choice([0, 0, 1, 3, 9])
        ranges.append(f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}")
        first = last + random.randint(2, 9)
    return ",".join(ranges)


def test_two_thousand_random_node_lists_are_read_as_scontrol_and_clustershell_read_them(slurm: SlurmCluster) -> None:
    """Scontrol in its order, a hundred lists at a time; ClusterShell, which sorts names, each list by itself."""
    random = Random(15)  # noqa: S311 - lists for a test
    lists = [write_random_list(random) for _ in range(2_000)]
    for text in lists:
        assert sorted(set(parse_nodelist(text))) == sorted(NodeSet(text)), text
    for start in range(0, len(lists), 100):
        part = lists[start : start + 100]
        expected = [node for text in part for node in parse_nodelist(text)]
        assert slurm.run("scontrol", "show", "hostnames", ",".join(part)).split() == expected, part
