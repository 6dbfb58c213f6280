"""Two of three nodes die one shortly after the other, the host of the store first; the job forms again at once."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.job import PORT
from tests.support.hosts import virtual_hosts
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.host_process import HostProcess
    from tests.support.hosts import VirtualHost, VirtualHosts

WORKER = """
import os, signal
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
signal.pause()
"""
#: Nothing that could end a wait is short: no lease, no last call, no join timeout.
CONF = "keep_alive_interval=5,keep_alive_max_attempt=6,last_call_timeout=600,join_timeout=600"
#: Seconds in which the job forms again. A lease is 30 s.
SOON = 15.0


def start(hosts: VirtualHosts, script: Path) -> list[HostProcess]:
    """Start an agent on each host, and wait until all train."""
    agents = [start_agent(host, hosts, script) for host in hosts]
    for agent in agents:
        agent.wait_line("rank . of 3", deadline=60)
    return agents


def start_agent(host: VirtualHost, hosts: VirtualHosts, script: Path) -> HostProcess:
    """Start an agent on a host."""
    endpoint = ",".join(f"{one.name}:{PORT}" for one in hosts)
    return host.start(
        [
            *(sys.executable, "-m", "elastic_run", "--nnodes=1:3", "--nproc-per-node=1", "--rdzv-id=j"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={CONF}"),
            *("--scale-up-delay=0", "--shutdown-timeout=1", str(script)),
        ],
        merge=True,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("comes_back", [True, False], ids=["restarted", "gone"])
def test_the_job_forms_at_once_after_two_deaths(tmp_path: Path, comes_back: bool) -> None:
    """The host of the store is killed and restarted, then another node is killed: nobody waits for a lease."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    with virtual_hosts(3) as hosts:
        agents = start(hosts, script)
        agents[0].kill()
        agents[0].process.wait(30)
        time.sleep(0.5)  # the schedule is the subject
        restarted = start_agent(hosts[0], hosts, script)
        time.sleep(1.5)
        seen = agents[2].stdout.count("rank ")
        agents[1].kill()
        agents[1].process.wait(30)
        living = [restarted, agents[2]]
        if comes_back:
            time.sleep(0.5)
            living.append(start_agent(hosts[1], hosts, script))
        try:
            wait_until(lambda: are_together(living, seen), deadline=SOON, what=f"a round of {len(living)}")
        except DeadlinePassedError as error:
            raise AssertionError("\n---\n".join(agent.stdout for agent in (*agents, *living))) from error


def are_together(living: list[HostProcess], seen: int) -> bool:
    """Tell whether all that live run a round of their number, and the second of them one more than it had seen."""
    last = f"of {len(living)}"
    return all(agent.stdout.rstrip().endswith(last) for agent in living) and living[1].stdout.count("rank ") > seen
