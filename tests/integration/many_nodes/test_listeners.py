"""Which addresses an agent's ports are open on: seen from another machine, through either of two networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.local_rendezvous import COPIED, copied, wait_join_line
from tests.support.sessions import can_connect
from tests.support.switch import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

#: The network of the default route, as IPv4 and IPv6, and another one.
FIRST, FIRST6, SECOND = "10.77.0.10", "fd77::10", "10.88.0.10"
ALL = {FIRST, FIRST6, SECOND}
PORT = 29400
WORKER = """
import os, signal
print("master", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
signal.pause()
"""


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Boot two hosts with two networks between them."""
    with virtual_hosts(2) as booted:
        one, other = booted
        pair = ("netns", str(one.first_pid), "type", "veth", "peer", "name", "eth1", "netns", str(other.first_pid))
        run(["ip", "link", "add", "eth1", *pair])
        for host in booted:
            host.run("ip", "addr", "add", f"10.88.0.{host.number}/24", "dev", "eth1")
            host.run("ip", "link", "set", "eth1", "up")
        yield booted


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the program of a worker that says where its store is, and waits."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return path


def start(host: VirtualHost, *words: object) -> HostProcess:
    """Start an agent on a host."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    return host.start([sys.executable, "-m", "elastic_run", *map(str, words)], env=environment)


def place(endpoint: str, conf: str = "") -> tuple[str, ...]:
    """Return the flags by which nodes meet at an endpoint."""
    conf = f"--rdzv-conf=last_call_timeout=0{conf}"
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=j", conf)


def start_c10d(host: VirtualHost, endpoint: str, script: Path, *, conf: str = "") -> HostProcess:
    """Start the only node so far of a job that meets at an endpoint, and wait until its worker runs."""
    return start(host, *place(endpoint, conf), "--nnodes=1:2", "--nproc-per-node=1", script)


def find_open(hosts: VirtualHosts, port: int) -> set[str]:
    """Return those of the first host's addresses at which the second one reaches a port of it."""
    with hosts[1].on_network():
        return {address for address in ALL if can_connect(address, port)}


def master_of(agent: HostProcess) -> tuple[str, int]:
    """Return the address and the port of the workers' store."""
    said = agent.wait_line(r"master (\S+) (\d+)")
    return said[1], int(said[2])


@pytest.mark.parametrize(
    ("endpoint", "job_store", "master"),
    [
        (SECOND, {SECOND}, SECOND),
        (FIRST, {FIRST}, FIRST),
        (f"[{FIRST6}]", {FIRST6}, FIRST6),
        ("h0", {FIRST, FIRST6}, None),
        ("localhost", set(), "127.0.0.1"),
        ("127.0.0.1", set(), "127.0.0.1"),
        ("[::1]", set(), "::1"),
    ],
)
def test_the_stores_are_open_at_the_endpoints_address_only(
    hosts: VirtualHosts, script: Path, endpoint: str, job_store: set[str], master: str | None
) -> None:
    """The job's store listens at the endpoint's addresses and no other, the workers' store at its own."""
    agent = start_c10d(hosts[0], f"{endpoint}:{PORT}", script)
    address, port = master_of(agent)
    assert find_open(hosts, PORT) == job_store
    assert find_open(hosts, port) == {address} & ALL
    assert address == (master or address)


def test_a_name_that_others_may_know_by_another_address_opens_all(hosts: VirtualHosts, script: Path) -> None:
    """Where the endpoint's name is loopback here, as Debian has it for a machine's own name, nodes can still come."""
    names = "127.0.0.1 localhost\n127.0.1.1 h0\n"
    (hosts._files / "hosts").write_text(names, encoding="ascii")
    agent = start_c10d(hosts[0], f"h0:{PORT}", script)
    address, port = master_of(agent)
    assert find_open(hosts, PORT) == ALL
    assert find_open(hosts, port) == {address} == {FIRST}
    agent.wait_line(
        f"the job's store listens at port {PORT} of all interfaces: h0 is 127.0.1.1 here, and another address on"
    )


def test_an_address_of_no_interface_opens_all(hosts: VirtualHosts, script: Path) -> None:
    """Behind a translated address (a cloud's public one) the host of the store can't know the real one."""
    agent = start_c10d(hosts[0], f"203.0.113.7:{PORT}", script, conf=",is_host=true")
    master_of(agent)
    assert find_open(hosts, PORT) == ALL
    agent.wait_line(
        f"the job's store listens at port {PORT} of all interfaces: 203.0.113.7, which is no address of this"
    )


def test_an_address_for_the_others_that_is_not_this_machines(hosts: VirtualHosts, script: Path) -> None:
    """With a --local-addr that is translated elsewhere the workers' store is open at all interfaces, with a line."""
    agent = start(hosts[0], "--nnodes=1:2", "--local-addr=203.0.113.7", script)
    address, port = master_of(agent)
    assert address == "203.0.113.7"
    assert find_open(hosts, port) == ALL
    agent.wait_line("the workers' store listens on all interfaces: 203.0.113.7, which is no address of this machine")


def test_local_addr_is_where_workers_meet(hosts: VirtualHosts, script: Path) -> None:
    """With --local-addr both stores of a job without an endpoint listen there, and the join line says so."""
    agent = start(hosts[0], "--nnodes=1:2", f"--local-addr={SECOND}", script)
    address, port = master_of(agent)
    assert address == SECOND
    assert find_open(hosts, PORT) == find_open(hosts, port) == {SECOND}
    assert f"--rdzv-endpoint={SECOND}:{PORT}" in agent.wait_line("other nodes join with.*")[0]


def test_without_a_default_route_the_join_line_has_an_address_of_a_network(hosts: VirtualHosts, script: Path) -> None:
    """On a network without a default route the command for the others names an address of it, and works."""
    for host in hosts:
        host.run("ip", "route", "del", "default")
    agent = start(hosts[0], "--nnodes=2", script)
    assert f" --rdzv-endpoint={FIRST}:{PORT} " in wait_join_line(agent)
    other = hosts[1].start(copied(agent), env=COPIED)
    assert {master_of(agent), master_of(other)} == {master_of(agent)}
    assert find_open(hosts, PORT) == {FIRST}


def test_static_listens_at_the_masters_address(hosts: VirtualHosts, script: Path) -> None:
    """Rank 0 of a static job listens at --master-addr only, for its agents and its workers."""
    flags = ("--nnodes=2", f"--master-addr={SECOND}", f"--master-port={PORT}", script)
    agents = [start(host, f"--node-rank={rank}", *flags) for rank, host in enumerate(hosts)]
    assert [master_of(agent) for agent in agents] == [(SECOND, PORT)] * 2
    assert find_open(hosts, PORT) == {SECOND}
