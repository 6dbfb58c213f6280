"""A stranger fills and reads the workers' store: the job goes on, and one line says which connection was refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support import hostile
from tests.support.launch import ELASTIC_RUN
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


def make_gate(path: Path) -> Path:
    """Make a pipe: a worker that reads it waits until the test opens and closes the other end."""
    os.mkfifo(path)
    return path


def test_a_job_of_one_node_survives(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A stranger at the workers' loopback store can neither end the launcher nor make its memory grow without bound."""
    go = make_gate(tmp_path / "go")
    job = launch("--nproc-per-node=1", worker(WAITS), program=LIMITED, env={"GO": str(go)})
    port = int(job.wait_line(r"store (\S+) (\d+)")[2])
    hostile.multiply("127.0.0.1", port)
    hostile.fill("127.0.0.1", port)
    go.write_text("")
    assert job.wait_exit() == 0, job.stderr
    for bound in ("a reply of", "the store holds"):
        (line,) = [line for line in job.stderr.splitlines() if bound in line]
        assert "127.0.0.1:" in line


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_hostile_messages_leave_the_server_within_its_bounds(seed: int) -> None:
    """After 10,000 hostile messages the server still serves other clients, within its bounds of memory."""
    outcome = hostile.run(seed, 10_000, deadline=4 * DEADLINE)
    # The keys, the waits, and what connections hold, with what an allocator keeps.
    assert outcome.growth < 6 * hostile.MEASURE
