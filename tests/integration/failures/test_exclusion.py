"""Nodes that the job goes on without: by an exit code of a worker, and by the job's own history."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import contract
from tests.support.launch import launch as run
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: The worker of the node that was given LEMON=1 fails as long as it is in the job; the others wait for the end.
LEMON = """
    world, code = int(os.environ["WORLD_SIZE"]), int(os.environ["CODE"])
    say("world", world)
    if os.environ.get("LEMON") == "1":
        print("GPU 2 has fallen off the bus", file=sys.stderr)
        sys.exit(code)
    if world == 3:
        signal.pause()
"""


def start(
    launch: Launch, path: Path, *flags: str | Path, code: int, machines: tuple[str, ...] = ()
) -> tuple[list[Launched], int]:
    """Start a job of two or three nodes, the second one of which is a lemon."""
    port = free_port()
    words = (*place(port, "last_call_timeout=600"), "--nnodes=2:3", "--max-backoff=0", *flags, path)
    agents = []
    for number in range(3):
        env = {"LEMON": str(int(number == 1)), "CODE": str(code)}
        if machines:
            env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": machines[number]}
        agents.append(launch(*words, env=env))
        if number == 0:
            wait_coordinated(port)
    return agents, port


def test_an_exit_code_excludes_its_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The node leaves with 211 and its reason, also in failure.json; the others go on, without a restart."""
    logs = tmp_path / "logs"
    agents, _ = start(launch, worker(LEMON), "--exclude-exit-codes=77", f"--log-dir={logs}", code=77)
    assert [agent.wait_exit() for agent in agents] == [0, contract.EXIT_EXCLUDED, 0]
    reason = "exit code 77 is listed in --exclude-exit-codes"
    assert reason in " ".join(agents[1].stderr.split())
    for agent in (agents[0], agents[2]):
        assert agent.stdout.splitlines()[-1] == "world 2"
        assert "restart 0" in agent.stderr
        assert f"is excluded, {reason}" in agent.stderr
    found = [json.loads(path.read_text()) for path in logs.rglob(contract.FAILURE_FILE)]
    assert [(one["verdict"], one["exit_code"]) for one in found] == [("excluded", contract.EXIT_EXCLUDED)]


def test_no_fault_hits_twice(launch: Launch, worker: Worker) -> None:
    """With --exclude-after=2/1h the second failure of a node is its last; the line for its machine is printed."""
    flags = ("--exclude-after=2/1h", "--max-restarts=5")
    agents, port = start(launch, worker(LEMON), *flags, code=3, machines=("gpu1", "gpu2", "gpu3"))
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    assert "the cause of 2 failures within 3600 s" in " ".join(agents[1].stderr.split())
    assert "kubectl cordon gpu2" in agents[1].stderr
    assert agents[1].stdout == "world 3\n" * 2
    assert [agents[0].wait_exit(), agents[2].wait_exit()] == [0, 0]
    assert "is excluded, the cause of 2 failures within 3600 s" in agents[0].stderr
    assert port


def test_a_machine_is_told_that_it_is_excluded(launch: Launch, worker: Worker) -> None:
    """Another launcher on an excluded machine is sent away while the job goes on."""
    path = worker(
        """
        if os.environ["LEMON"] == "1" and os.environ["WORLD_SIZE"] == "3":
            sys.exit(77)
        say("world", os.environ["WORLD_SIZE"])
        signal.pause()
        """
    )
    agents, port = start(launch, path, "--exclude-exit-codes=77", code=77, machines=("gpu1", "gpu2", "gpu3"))
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    agents[0].wait_line("^world 2$")
    words = (*place(port, "last_call_timeout=600"), "--nnodes=2:3", "--max-backoff=0", "--exclude-exit-codes=77", path)
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "gpu2", "LEMON": "1", "CODE": "77"}
    again = launch(*words, env=env)
    assert again.wait_exit() == contract.EXIT_EXCLUDED
    assert again.stdout == ""


@pytest.mark.parametrize("flag", ["--exclude-exit-codes=77", "--exclude-after=1/1h"])
def test_the_host_of_the_only_store_stays(launch: Launch, worker: Worker, flag: str) -> None:
    """A job is not ended to exclude the node that serves its store: a line says that it is kept."""
    path = worker("sys.exit(77 if os.environ['LEMON'] == '1' and attempt == 0 else 0)")
    port = free_port()
    words = (*place(port, "last_call_timeout=600"), "--nnodes=1:2", "--max-restarts=1", flag, path)
    host = launch(*words, env={"LEMON": "1"})
    wait_coordinated(port)
    other = launch(*words, env={"LEMON": "0"})
    assert [host.wait_exit(), other.wait_exit()] == [0, 0]
    assert "it serves the job's only store" in other.stderr


def test_a_coordinator_with_a_lease_is_excluded_as_any_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Another node takes the lease, and the job goes on without the excluded one."""
    path = worker(
        """
        if os.environ["WORLD_SIZE"] == "2":
            sys.exit(77) if os.environ["LEMON"] == "1" else signal.pause()
        say("alone")
        """
    )
    conf = "--rdzv-conf=store_type=file,last_call_timeout=600"
    words = ("--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/", conf, "--nnodes=1:2", "--exclude-exit-codes=77")
    first = launch(*words, path, env={"LEMON": "1"})
    wait_until(lambda: any(tmp_path.rglob("last_round")), what="the coordinator's address")
    other = launch(*words, path, env={"LEMON": "0"})
    assert [first.wait_exit(), other.wait_exit()] == [contract.EXIT_EXCLUDED, 0]
    assert other.stdout == "alone\n"


def list_left_out(pid: int) -> list[dict[str, Any]]:
    """Return what `elastic-run status` says of the nodes that a job goes on without; [] until it answers."""
    with run("status", "--json", str(pid)) as command:
        code = command.wait_exit()
    found: list[dict[str, Any]] = [] if code else json.loads(command.stdout)["left_out"]
    return found


def test_status_lists_the_nodes_that_are_left_out(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Each node of the job answers with the excluded node, its reason and when it may come back."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = f"{LEMON}\n    open({str(gate)!r}).close()\n"
    flags = ("--exclude-exit-codes=77", "--exclude-after=9/1h")
    agents, _ = start(launch, worker(body), *flags, code=77)
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    for agent in (agents[0], agents[2]):
        agent.wait_line("world 2")
        (found,) = wait_until(partial(list_left_out, agent.pid), what="a node that is left out")
        assert (found["kind"], found["host"]) == ("excluded", os.uname().nodename)
        assert "exit code 77 is listed in --exclude-exit-codes" in found["reason"]
        assert 3000 < found["expires"] < 3600
    with gate.open("w"):  # until each of the two has come to it
        assert [agents[0].wait_exit(), agents[2].wait_exit()] == [0, 0]
