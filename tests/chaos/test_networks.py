"""Hosts with two network cards, and hosts without IPv4: the addresses that agents and workers get; real training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.switch import run

if TYPE_CHECKING:
    from tests.support.hosts import HostProcess, VirtualHosts

#: Says what it was given, and shows that the workers' store is there.
WORKER = """
import os
from elastic_run.store.client import StoreClient
with StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=10) as store:
    store.add("workers", 1)
print("rank", os.environ["RANK"], "master", os.environ["MASTER_ADDR"], flush=True)
"""
TRAINING = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
rank = distributed.get_rank()
weight = torch.nn.Parameter(torch.zeros(4))
for step in range(20):
    loss = ((weight - (rank + 1)) ** 2).sum()
    weight.grad = None
    loss.backward()
    distributed.all_reduce(weight.grad)
    with torch.no_grad():
        weight -= 0.1 * weight.grad
assert torch.allclose(weight, torch.full((4,), 1.5), atol=0.05), weight
print("trained", rank, flush=True)
distributed.destroy_process_group()
"""
SECOND = "10.88.0"


def add_second_network(hosts: VirtualHosts) -> None:
    """Give two hosts a second card each, eth1, and a cable between those; the default route stays where it was."""
    one, other = hosts
    pair = ("netns", str(one.first_pid), "type", "veth", "peer", "name", "eth1", "netns", str(other.first_pid))
    run(["ip", "link", "add", "eth1", *pair])
    for host in hosts:
        host.run("ip", "addr", "add", f"{SECOND}.{host.number}/24", "dev", "eth1")
        host.run("ip", "link", "set", "eth1", "up")


def start(
    hosts: VirtualHosts, script: Path, endpoint: str, *, own: tuple[tuple[str, ...], ...] = ((), ())
) -> list[HostProcess]:
    """Start an agent on each host; the second is to be node 0, which does not serve the job's store."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = (sys.executable, "-m", "elastic_run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=j")
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    return [
        host.start([*command, *place, f"--node-rank={1 - number}", *own[number], str(script)], env=environment)
        for number, host in enumerate(hosts)
    ]


def assert_ended_well(agents: list[HostProcess], said: list[str]) -> None:
    """See that all agents end with 0 and their workers have said this."""
    assert [agent.wait_exit(deadline=40) for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    assert sorted("".join(agent.stdout for agent in agents).splitlines()) == said


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the worker's program."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return path


@pytest.mark.parametrize("network", [SECOND, "10.77.0"])
def test_the_address_is_that_of_the_card_that_reaches_the_endpoint(script: Path, network: str) -> None:
    """Whichever network the endpoint is on, workers get a MASTER_ADDR on it, and reach it."""
    with virtual_hosts(2) as hosts:
        add_second_network(hosts)
        agents = start(hosts, script, f"{network}.{hosts[0].number}:29400")
        master = f"{network}.{hosts[1].number}"
        assert_ended_well(agents, [f"rank {rank} master {master}" for rank in range(2)])


def test_local_addr_chooses_the_other_card(script: Path) -> None:
    """With --local-addr nodes meet on one network and work on the other."""
    with virtual_hosts(2) as hosts:
        add_second_network(hosts)
        own = tuple((f"--local-addr={SECOND}.{host.number}",) for host in hosts)
        agents = start(hosts, script, "h0:29400", own=own)
        master = f"{SECOND}.{hosts[1].number}"
        assert_ended_well(agents, [f"rank {rank} master {master}" for rank in range(2)])


def test_a_network_that_carries_nothing_is_named(script: Path) -> None:
    """Where the workers' network is dead the job ends at once everywhere, and says who can't reach whom."""
    with virtual_hosts(2) as hosts:
        add_second_network(hosts)
        hosts[1].run("ip", "link", "set", "eth1", "down")
        own = tuple((f"--local-addr={SECOND}.{host.number}",) for host in hosts)
        agents = start(hosts, script, "h0:29400", own=own)
        codes = [agent.wait_exit(deadline=60) for agent in agents]
        assert codes[0] == codes[1] != 0
        for agent in agents:
            said = " ".join(agent.stderr.split())
            assert f"h0 ({SECOND}.{hosts[0].number}) can't reach the store of rank 0 at {SECOND}" in said, said
        assert agents[0].stdout == ""


@pytest.mark.parametrize(
    "has_name", [pytest.param(False, id="an address", marks=pytest.mark.soak), pytest.param(True, id="a name")]
)
def test_hosts_without_ipv4(tmp_path: Path, *, has_name: bool) -> None:
    """With IPv6 alone nodes meet at an address or a name, and train with gloo."""
    path = tmp_path / "training.py"
    path.write_text(TRAINING, encoding="utf-8")
    with virtual_hosts(2) as hosts:
        names = "\n".join(["::1 localhost", *(f"{host.address6} {host.name}" for host in hosts)])
        (hosts._files / "hosts").write_text(f"{names}\n", encoding="ascii")
        for host in hosts:
            for card in ("eth0", "lo"):
                host.run("ip", "-4", "addr", "flush", "dev", card)
        agents = start(hosts, path, "h0:29400" if has_name else f"[{hosts[0].address6}]:29400")
        assert_ended_well(agents, ["trained 0", "trained 1"])
