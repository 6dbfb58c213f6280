"""A stranger who reaches a job's store, fills it and reads it: the job goes on, and one line says what was refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.tcpstore import wire
from tests.support import hostile, stranger
from tests.support.launch import ELASTIC_RUN
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: The attack would take 24 GB. With a limit on addresses it fails at once, and harms no other program.
LIMITED = ("bash", "-c", 'ulimit -v 3000000; exec "$@"', "limited", *ELASTIC_RUN)
WAITS = "say('store', os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\nopen(os.environ['GO']).read()"


KEYS = (b"/stranger", wire.AGENT_PREFIX + b"stranger")


def make_gate(path: Path) -> Path:
    """Make a pipe that holds a worker until somebody has opened and closed its other end."""
    os.mkfifo(path)
    return path


def attack(port: int, key: bytes) -> None:
    """Fill and read a store, in the space that the key belongs to."""
    stranger.multiply("127.0.0.1", port, key=key)
    stranger.fill("127.0.0.1", port, key=key)


def test_a_job_of_one_node_survives(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Whoever reaches the loopback store of the workers can make the launcher neither grow without bound nor end."""
    go = make_gate(tmp_path / "go")
    job = launch("--nproc-per-node=1", worker(WAITS), program=LIMITED, env={"GO": str(go)})
    port = int(job.wait_line(r"store (\S+) (\d+)")[2])
    attack(port, b"/stranger")
    go.write_text("")
    assert job.wait_exit() == 0, job.stderr
    for bound in ("a reply of", "the store holds"):
        (line,) = [line for line in job.stderr.splitlines() if bound in line]
        assert "127.0.0.1:" in line


@pytest.mark.parametrize("token", [None, "a secret of thirty-two characters"], ids=["without a token", "with a token"])
@pytest.mark.parametrize("key", KEYS, ids=["workers' space", "agents' space"])
def test_a_job_of_two_nodes_survives(
    launch: Launch, worker: Worker, tmp_path: Path, token: str | None, key: bytes
) -> None:
    """Whoever reaches the job's store can make no node end."""
    port = free_port()
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j", "--nnodes=2")
    path = worker(WAITS)
    gates = [make_gate(tmp_path / name) for name in ("first", "second")]
    nodes = [
        launch(*place, path, program=LIMITED, env={"GO": str(gate), "ELASTIC_RUN_RDZV_TOKEN": token}) for gate in gates
    ]
    for node in nodes:
        node.wait_line(r"^store \S+ \d+$")
    attack(port, key)
    for gate in gates:
        gate.write_text("")
    assert [node.wait_exit() for node in nodes] == [0, 0], [node.stderr for node in nodes]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_hostile_messages_leave_the_server_within_its_bounds(seed: int) -> None:
    """After 10,000 hostile messages the server lives, serves others, and has taken no more than its bounds."""
    outcome = hostile.run(seed, 10_000, has_token=False, deadline=4 * DEADLINE)
    # The workers' keys, the agents', the waits of each, and what connections hold, with what an allocator keeps.
    assert outcome.growth < 6 * hostile.MEASURE


def test_a_stranger_to_the_token_reads_and_changes_nothing() -> None:
    """After 20,000 hostile messages without a proof the job's key is unread and unchanged, and no memory was taken."""
    outcome = hostile.run(3, 20_000, has_token=True, deadline=4 * DEADLINE)
    assert outcome.growth < 16 * stranger.MIB
