"""A node that was cut off for longer than the lease, in a job whose store can move, comes back to the others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from pathlib import Path

WORKER = """
import os, signal
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
signal.pause()
"""
CONF = "keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=0"


@pytest.mark.long
@pytest.mark.parametrize("alone", [0, 2], ids=["the host", "another"])
def test_a_node_that_was_alone_joins_again(tmp_path: Path, alone: int) -> None:
    """The node forms no round of its own while it is cut off, and is in the others' round when it isn't any more."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    with virtual_hosts(3) as hosts:
        endpoints = ",".join(f"{host.name}:29400" for host in hosts)
        command = (
            *(sys.executable, "-m", "elastic_run", "--nnodes=2:3", "--nproc-per-node=1", "--rdzv-id=j"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}", f"--rdzv-conf={CONF}", "--scale-up-delay=0"),
            *("--shutdown-timeout=1", str(script)),
        )
        agents = [host.start(command) for host in hosts]
        for agent in agents:
            agent.wait_line("rank . of 3", deadline=30)
        hosts[alone].link_down()
        others = [agent for number, agent in enumerate(agents) if number != alone]
        for agent in others:
            agent.wait_line("rank . of 2", deadline=60)
        agents[alone].wait_line(r"waiting: 1/|stopping the workers|going on at", deadline=60)
        hosts[alone].link_up()
        agents[alone].wait_lines("rank . of 3", count=2, deadline=60)
        for agent in others:
            agent.wait_lines("rank . of 3", count=2, deadline=60)
        assert "of 1" not in agents[alone].stdout
