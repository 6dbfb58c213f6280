"""`elastic-run drain`: a node leaves a running job, asked from any node."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.client import Call, ControlError, ask
from elastic_run.control.socket_directory import find_sockets
from tests.support.launch import launch as start
from tests.support.local_rendezvous import wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_WAITS = "say('rank', rank, 'of', os.environ['WORLD_SIZE'], 'restarts', attempt)\nsignal.pause()\n"


def drain(node: str, environment: dict[str, str]) -> Launched:
    """Run the command to its end."""
    with start("drain", node, env=environment) as command:
        command.wait_exit()
    return command


def has_socket(environment: dict[str, str]) -> bool:
    """Whether an agent has opened its control socket there."""
    return bool(find_sockets(environment)[0])


def shows_all_nodes(environment: dict[str, str]) -> bool:
    """Whether all nodes answer: a node that has just come takes no part in a drain that was asked for before."""
    with start("status", "--json", env=environment) as command:
        command.wait_exit()
    return command.stdout.count('"host"') == 3


@pytest.fixture
def nodes(launch: Launch, worker: Worker, tmp_path: Path) -> list[tuple[Launched, dict[str, str]]]:
    """Start a job of three nodes, each with a directory of sockets of its own, as other machines have."""
    port = free_port()
    place = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=1:3")
    words = (*place, "--rdzv-conf=last_call_timeout=600", "--max-restarts=0", worker(_WAITS))
    made = []
    for rank in range(3):
        environment = {ENV_CONTROL_DIR: str(tmp_path / str(rank))}
        (tmp_path / str(rank)).mkdir()
        made.append((launch(f"--node-rank={rank}", *words, env=environment), environment))
        wait_coordinated(port)  # by the first: the job ends with the node that serves it
    for node, environment in made:
        node.wait_line("of 3 restarts 0")
        wait_until(partial(shows_all_nodes, environment), what="the answers of all nodes")
    return made


def test_a_node_that_is_drained_leaves_and_the_others_go_on(nodes: list[tuple[Launched, dict[str, str]]]) -> None:
    """Asked from another node, and on the node itself; no restart of the budget is used, and the cause is told."""
    (first, environment), (second, _), (third, own) = nodes
    asked = drain("1", environment)
    assert (asked.process.returncode, "(node rank 1) leaves job j" in asked.stderr) == (0, True), asked.stderr
    assert second.wait_exit() == 143
    assert "elastic-run drain" in second.stderr
    for node in (first, third):
        node.wait_line("of 2 restarts 0")
    asked = drain("1", own)  # node ranks have no gap, so it has this one now
    assert asked.process.returncode == 0, asked.stderr
    assert third.wait_exit() == 143
    first.wait_line("rank 0 of 1 restarts 0")
    assert first.process.poll() is None


def test_a_node_that_is_not_there_is_refused(nodes: list[tuple[Launched, dict[str, str]]]) -> None:
    """One line names the nodes; nobody leaves."""
    refused = drain("node7", nodes[0][1])
    assert refused.process.returncode == 2
    assert "job j has no node 'node7'; it has " in refused.stderr
    assert refused.stderr.count("(node rank ") == 3
    (path,) = find_sockets(nodes[0][1])[0]
    with pytest.raises(ControlError, match="this is not the name of a node"):
        ask(path, Call("drain", {"node": "a\nb"}))
    assert [node.process.poll() for node, _ in nodes] == [None] * 3


def test_a_spare_hides_no_node_that_does_not_answer(
    nodes: list[tuple[Launched, dict[str, str]]], launch: Launch, tmp_path: Path
) -> None:
    """Of a stopped node `drain` says that it may be the named one, and `status` that it is missing."""
    words = nodes[0][0].process.args
    assert isinstance(words, list)
    spare = launch(*(word for word in words[3:] if word != "--node-rank=0"), env={ENV_CONTROL_DIR: str(tmp_path)})
    spare.wait_line("as a spare")
    (_, environment), _, (stopped, _) = nodes
    stopped.send(signal.SIGSTOP)
    asked = drain("2", environment)
    assert (asked.process.returncode, "1 node of 3 did not answer, and may be '2'" in asked.stderr) == (1, True), asked
    with start("status", env=environment) as shown:
        assert shown.wait_exit() == 0
    assert "1 of 3 nodes have not answered" in shown.stderr
    stopped.send(signal.SIGCONT)


def test_a_job_of_one_node_is_not_drained(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The line names the command that ends it."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    job = launch(worker(_WAITS), env=environment)
    wait_until(partial(has_socket, environment), what="the control socket")
    refused = drain("0", environment)
    assert refused.process.returncode == 2
    assert f"job {job.pid} has one node: `elastic-run stop {job.pid}` ends it" in refused.stderr
