"""What workers on several hosts say of a network that lets them down."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from tests.support.hosts import HostProcess, VirtualHosts

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
