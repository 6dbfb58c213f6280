"""A node goes silent together with the store that it serves: the others lose no more time than with any other node."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.host_process import HostProcess
    from tests.support.hosts import VirtualHost

WORKER = """
import os, signal
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
signal.pause()
"""
#: Seconds: the default.
LEASE = 6.0
#: Seconds beyond the lease in which it must have been found out; a second where nothing else keeps the machine busy.
FOUND_OUT = 3.0
CONF = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=30"


def end_by_power(host: VirtualHost, agent: HostProcess) -> None:
    """Take the host's power."""
    del agent
    host.poweroff()


def end_by_darkness(host: VirtualHost, agent: HostProcess) -> None:
    """Drop all that the host sends or is sent."""
    del agent
    host.go_dark()


def end_by_kill(host: VirtualHost, agent: HostProcess) -> None:
    """Kill the agent: connections are refused from then on."""
    del host
    agent.kill()


def wait_round(agents: Sequence[HostProcess], size: int) -> float:
    """Wait until the agents' workers run in a round of this size, and return the time."""
    for agent in agents:
        agent.wait_line(f"rank . of {size}", deadline=60)
    return time.monotonic()


@pytest.mark.parametrize("end", [end_by_power, end_by_darkness, end_by_kill])
def test_the_host_of_the_store_is_not_waited_for_twice(
    tmp_path: Path, end: Callable[[VirtualHost, HostProcess], None]
) -> None:
    """The next round comes one lease later than where a node says that it goes, not two."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    with virtual_hosts(4) as hosts:
        endpoints = ",".join(f"{host.name}:29400" for host in hosts[:3])
        command = (
            *(sys.executable, "-m", "elastic_run", "--nnodes=2:4", "--nproc-per-node=1", "--rdzv-id=j"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}", f"--rdzv-conf={CONF}", "--scale-up-delay=0"),
            *("--shutdown-timeout=1", str(script)),
        )
        agents = [host.start(command) for host in hosts]
        wait_round(agents, 4)
        begin = time.monotonic()
        agents[3].send(signal.SIGTERM)
        usual = wait_round(agents[:3], 3) - begin
        begin = time.monotonic()
        end(hosts[0], agents[0])
        taken = wait_round(agents[1:3], 2) - begin
        assert taken < LEASE + FOUND_OUT + usual
