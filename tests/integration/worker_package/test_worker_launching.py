"""Scripts that start their own workers, and what workers on several hosts say of a bad network."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from tests.support.hosts import HostProcess, VirtualHosts
    from tests.support.launch import Launch, Worker


PYTHON = (sys.executable,)
QUIET = {"OMP_NUM_THREADS": "1"}
HEAD = """
import os, sys
import elastic_run.worker as worker
from elastic_run import ChildFailedError, LaunchConfig

def train(scale, fail=False):
    context = worker.init_distributed()
    if fail and context.rank == 1:
        raise ValueError("no such data")
    return [context.rank, context.world_size, context.launcher, worker.reduce_mean(context.rank * scale)]
"""


@pytest.fixture
def script(tmp_path: Path) -> Worker:
    """Write a script with a function `train`; the body is its main part."""

    def write(body: str) -> Path:
        path = tmp_path / "self_made.py"
        main = textwrap.indent(textwrap.dedent(body), "    ")
        path.write_text(f'{HEAD}\nif __name__ == "__main__":\n{main}', encoding="utf-8")
        return path

    return write


def test_plain_python_starts_the_workers(launch: Launch, script: Worker) -> None:
    """Without a launcher the script runs its function on as many workers as it asks for, and gets what they return."""
    path = script("print(worker.launch_subprocesses(train, 2, 10.0))")
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: [0, 2, 'elastic-run', 5.0], 1: [1, 2, 'elastic-run', 5.0]}\n"


@pytest.mark.long
def test_a_configuration_says_how(launch: Launch, script: Worker) -> None:
    """A LaunchConfig is taken as it is: here with the start method and the number of workers."""
    path = script("""
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="local", run_id="own", start_method="fork"
        )
        print(worker.launch_subprocesses(train, config, 3.0))
    """)
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: [0, 1, 'elastic-run', 0.0]}\n"


@pytest.mark.long
def test_under_a_launcher_the_function_is_just_called(launch: Launch, script: Worker) -> None:
    """A worker of elastic-run starts no others: it calls the function itself."""
    job = launch(
        "--preload=torch",
        "--nproc-per-node=2",
        script("os.write(1, f'{worker.launch_subprocesses(train, 7, 10.0)}\\n'.encode())"),
        env=QUIET,
    )
    assert job.wait_exit() == 0, job.stderr
    expected = [f"{{{rank}: [{rank}, 2, 'elastic-run', 5.0]}}" for rank in range(2)]
    assert sorted(job.stdout.splitlines()) == expected


@pytest.mark.long
def test_a_worker_that_fails_is_an_exception(launch: Launch, script: Worker) -> None:
    """What a worker raised is in the ChildFailedError that the script gets."""
    path = script("""
        try:
            worker.launch_subprocesses(train, 2, 1.0, True)
        except ChildFailedError as error:
            print("no such data" in str(error), 1 in error.failures)
    """)
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "True True\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("0", "ValueError: config=0: at least 1 worker"),
        ("'8'", "TypeError: config='8': it is a number of workers, or a LaunchConfig"),
    ],
)
def test_no_worker_is_no_job(launch: Launch, script: Worker, config: str, message: str) -> None:
    """Fewer than one worker is refused at once, and what is no number; it is named."""
    job = launch(script(f"worker.launch_subprocesses(train, {config})"), program=PYTHON, env=QUIET)
    assert job.wait_exit() == 1
    assert message in job.stderr


# --- several hosts ----------------------------------------------------------------------------------------------------
ROOT = Path(__file__).parents[3]
#: Goes on when all ranks have imported torch, however long that took them: what follows has a short timeout.
JOIN = """
import os, sys, time, torch.distributed
import elastic_run.worker as worker
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
while len(os.listdir(sys.argv[1])) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
context = worker.init_distributed(timeout=float(sys.argv[2]))
print("joined", context.rank, worker.reduce_mean(context.rank))
"""


def start_ranks(hosts: VirtualHosts, directory: Path, *, timeout: float) -> list[HostProcess]:
    """Start a rank on each host; rank 0 serves the store, so the names of the hosts are all that they know."""
    shared = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].name, "MASTER_PORT": "29500"}
    env = {**shared, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", JOIN, str(directory), str(timeout)]
    return [host.start(command, env={**env, "RANK": str(rank)}, merge=True) for rank, host in enumerate(hosts)]


@pytest.mark.timeout(180)
@pytest.mark.long
def test_two_hosts_that_do_not_reach_each_other_name_each_other(tmp_path: Path) -> None:
    """All reach the store, two don't reach each other: each names the other's rank and host, and what to look at."""
    with virtual_hosts(3) as hosts:
        hosts.silent_drop(hosts[1], hosts[2])
        ranks = start_ranks(hosts, tmp_path, timeout=2)  # gloo takes five times as long
        for rank, other in ((1, 2), (2, 1)):
            assert ranks[rank].wait_exit(deadline=90) == 1
            said = ranks[rank].stdout
            pattern = (
                rf"JoinError: rank {rank} on h{rank}: .* of 3 missing: rank .*{other} on h{other}.*look at firewalls"
            )
            assert re.search(pattern, said), said


@pytest.mark.timeout(180)
def test_hosts_that_reach_each_other_join(tmp_path: Path) -> None:
    """Without a launcher, ranks on several hosts join by what RANK and its like say."""
    with virtual_hosts(2) as hosts:
        ranks = start_ranks(hosts, tmp_path, timeout=60)
        assert [rank.wait_exit(deadline=90) for rank in ranks] == [0, 0]
        assert [rank.stdout.splitlines()[-1] for rank in ranks] == ["joined 0 0.5", "joined 1 0.5"]
