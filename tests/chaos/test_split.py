"""Two nodes whose store can move, cut from one another: what each does then, as --on-split says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.host_process import HostProcess
    from tests.support.hosts import VirtualHosts

WORKER = """
import os, signal
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
signal.pause()
"""
CONF = "keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=30"


def start(hosts: VirtualHosts, directory: Path, *, on_split: str, join_timeout: int) -> list[HostProcess]:
    """Start an agent on each of two hosts, and cut the hosts from one another when all workers run."""
    script = directory / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    command = (
        *(sys.executable, "-m", "elastic_run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=j"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=h0:29400,h1:29400", f"--on-split={on_split}"),
        *(f"--rdzv-conf={CONF},join_timeout={join_timeout}", "--scale-up-delay=0", "--shutdown-timeout=1", str(script)),
    )
    agents = [host.start(command) for host in hosts]
    for agent in agents:
        agent.wait_line("rank . of 2")
    hosts.silent_drop(hosts[0], hosts[1])
    return agents


def test_stop_lets_neither_go_on(tmp_path: Path) -> None:
    """With `stop` no node trains alone: both wait for the other, and end with 206 when it doesn't come."""
    with virtual_hosts(2) as hosts:
        agents = start(hosts, tmp_path, on_split="stop", join_timeout=8)
        for agent in agents:
            assert agent.wait_exit(deadline=60) == 206, agent.stderr
            assert "of 1" not in agent.stdout


@pytest.mark.long
def test_stop_goes_on_together_again(tmp_path: Path) -> None:
    """With `stop` the two train together again when the cut is mended in time."""
    with virtual_hosts(2) as hosts:
        agents = start(hosts, tmp_path, on_split="stop", join_timeout=120)
        for agent in agents:
            agent.wait_line("stopping the workers|going on at", deadline=60)
        hosts.heal()
        for agent in agents:
            agent.wait_lines("rank . of 2", count=2, deadline=60)
            assert "of 1" not in agent.stdout


def test_continue_lets_both_go_on(tmp_path: Path) -> None:
    """With `continue` each of the two trains alone at once, without waiting for the other."""
    with virtual_hosts(2) as hosts:
        agents = start(hosts, tmp_path, on_split="continue", join_timeout=120)
        for agent in agents:
            agent.wait_line("rank 0 of 1", deadline=30)
