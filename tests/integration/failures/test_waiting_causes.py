"""The first line of a node that waits: it comes after two seconds, and names the cause, the address and the time."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elastic_run import contract
from tests.support.hosts import virtual_hosts
from tests.support.programs import shortened
from tests.support.sessions import free_port
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts
    from tests.support.launch import Launch, Launched, Worker


#: The flags by which a node looks for a store that another one serves, by backend.
BACKENDS = {
    "c10d": ("--rdzv-backend=c10d", "--rdzv-conf=is_host=false", "--rdzv-endpoint={host}:{port}", "--rdzv-id=j"),
    "etcd": ("--rdzv-backend=etcd", "--rdzv-endpoint={host}:{port}", "--rdzv-id=j"),
    "etcd-v3": ("--rdzv-backend=etcd-v3", "--rdzv-endpoint={host}:{port}", "--rdzv-id=j"),
    "static": ("--master-addr={host}", "--master-port={port}", "--node-rank=1"),
}
#: The process of these tests, as a message names it.
OWN_PROCESS = f"pid {os.getpid()} ({psutil.Process().name()})"
#: Seconds in which the line must have come; the next one would come at twelve.
LATEST = 9.0


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Boot two hosts; nobody serves names on their network, and queries go unanswered."""
    with virtual_hosts(2) as booted:
        booted.switch.silence_resolver()
        yield booted


def flags_of(backend: str, host: str, port: int) -> list[str]:
    """Return the flags of a node that looks for its store."""
    return [*(flag.format(host=host, port=port) for flag in BACKENDS[backend]), "--nnodes=2"]


def launch_all(launch: Launch, worker: Worker, port: int) -> list[Launched]:
    """Start a node of each backend that looks for its store on this machine; each says its line after the same time."""
    path = worker("pass")
    return [launch(*flags_of(backend, "127.0.0.1", port), path) for backend in BACKENDS]


def wait_first_line(agent: Launched | HostProcess, name: str) -> str:
    """Wait for the first waiting line; return the cause in it."""
    said = agent.wait_line(
        rf"waiting: the store at {re.escape(name)} has been out of reach for (\d+) s: (.*), gives up in \d+:\d\d"
    )
    assert 2.0 <= time.monotonic() - agent.started_at < stretched(LATEST)
    assert 2 <= int(said[1]) <= stretched(LATEST)
    assert next(line for line in agent.stderr.splitlines() if "waiting:" in line) == said.string
    return said[2]


def test_nobody_listens(launch: Launch, worker: Worker) -> None:
    """Where the connection is refused the line says that nobody listens, and at which address."""
    port = free_port()
    for agent in launch_all(launch, worker, port):
        assert wait_first_line(agent, f"127.0.0.1:{port}") == f"nobody listens (connection refused) at 127.0.0.1:{port}"


def test_a_program_that_says_nothing(launch: Launch, worker: Worker, stack: ExitStack) -> None:
    """Where the connection is taken and no answer comes, the line says so, and which process of this machine it is."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listener.getsockname()[1]
    for backend, agent in zip(BACKENDS, launch_all(launch, worker, port), strict=True):
        cause = wait_first_line(agent, f"127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in cause
        if backend.startswith("etcd"):
            assert "does not answer" in cause
        else:
            assert "takes connections but sends no answer" in cause
            assert cause.endswith(f"; {OWN_PROCESS} listens there")


def test_a_program_that_is_no_store(launch: Launch, worker: Worker, stack: ExitStack) -> None:
    """Where another program listens the line says that it is no store, and which process of this machine it is."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listener.getsockname()[1]

    def greet() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken:
                taken.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                taken.recv(4096)

    for _ in range(20):  # each holds one connection until its agent closes it
        threading.Thread(target=greet, daemon=True).start()
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    no_store = f"what listens at 127.0.0.1:{port} is no agent of elastic-run; {OWN_PROCESS} listens there"
    for backend, agent in zip(BACKENDS, launch_all(launch, worker, port), strict=True):
        cause = wait_first_line(agent, f"127.0.0.1:{port}")
        assert ("does not speak HTTP" if backend.startswith("etcd") else no_store) in cause


def start(host: VirtualHost, *words: object, **more: str) -> HostProcess:
    """Start an agent on a host, with more variables."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **more}
    return host.start([sys.executable, "-m", "elastic_run", *map(str, words)], env=environment)


def test_a_host_that_drops_everything(hosts: VirtualHosts, worker: Worker) -> None:
    """Where packets are dropped, by a firewall or a machine that is off, the line says that nothing answers there."""
    hosts.silent_drop(*hosts)
    path = worker("pass")
    try:
        agents = [start(hosts[0], *flags_of(backend, "h1", 29400), path) for backend in BACKENDS]
        causes = [wait_first_line(agent, "h1:29400") for agent in agents]
    finally:
        hosts.heal()
    for cause in causes:
        assert cause.startswith("nothing answers at ")
        assert f"{hosts[1].address}:29400" in cause


def test_a_name_server_that_says_nothing(hosts: VirtualHosts, worker: Worker) -> None:
    """Where no name server answers the line says so, with the name."""
    flags = [flags_of(backend, "nosuch.example", 29400) for backend in BACKENDS]
    flags.append([flag for flag in flags[0] if flag != "--rdzv-conf=is_host=false"])  # c10d, the host is not known
    path = worker("pass")
    for agent in [start(hosts[0], *words, path) for words in flags]:
        cause = wait_first_line(agent, "nosuch.example:29400")
        assert cause.startswith(
            "no name server answers for the name 'nosuch.example'; if the name stays unknown, give all nodes"
        )


def test_an_unknown_name(hosts: VirtualHosts, worker: Worker) -> None:
    """Where the system says that there is no such name the line says so, with the system's reason."""
    path = hosts._files / "resolv.conf"
    before = path.read_text(encoding="ascii")
    path.write_text("nameserver 127.0.0.1\n", encoding="ascii")  # where nobody listens
    try:
        agent = start(hosts[0], *flags_of("c10d", "nosuch.example", 29400), worker("pass"))
        cause = wait_first_line(agent, "nosuch.example:29400")
    finally:
        path.write_text(before, encoding="ascii")
    assert cause.startswith("the name 'nosuch.example' has no address (")
    assert cause.endswith("; if the name stays unknown, give all nodes an address in its place")


def test_a_name_that_is_known_late(hosts: VirtualHosts, worker: Worker) -> None:
    """A node whose endpoint gets an address only later, and that is its own, serves the store then."""
    place = ("--rdzv-backend=c10d", "--rdzv-endpoint=late.example:29400", "--rdzv-id=j", "--nnodes=1:2")
    agent = start(hosts[0], *place, "--rdzv-conf=last_call_timeout=0", worker("say('runs')"))
    wait_first_line(agent, "late.example:29400")
    with (hosts._files / "hosts").open("a", encoding="ascii") as names:
        names.write(f"{hosts[0].address} late.example\n")
    assert agent.wait_exit() == 0
    assert "runs" in agent.stdout


def test_other_nodes_that_are_missing(launch: Launch, worker: Worker) -> None:
    """A node that waits for others says after two seconds how many of how many are there, whatever its heartbeats."""
    conf = "--rdzv-conf=keep_alive_interval=20"
    flags = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j", conf, "--nnodes=3")
    agent = launch(*flags, worker("pass"))
    agent.wait_line(r"waiting: 1/3 nodes \(")
    assert 2.0 <= time.monotonic() - agent.started_at < stretched(LATEST)


def test_a_node_that_was_refused(launch: Launch, worker: Worker) -> None:
    """The node that waits says which nodes were refused and why."""
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j", "--nnodes=2")
    conf, script = "--rdzv-conf=keep_alive_interval=0.5", worker("pass")
    often = shortened({"elastic_run.report.waiting.INTERVAL": 0.5})
    waiting = launch(*place, conf, script, program=often)
    waiting.wait_line(r"waiting: 1/2 nodes")
    refused = [launch(*place, conf, worker("pass")), launch(*place, conf, "--nnodes=3", script)]
    assert [agent.wait_exit() for agent in refused] == [contract.EXIT_REFUSED] * 2
    host = re.escape(os.uname().nodename)
    script_told = "the script of role 'default' is 'worker2.py' there and 'worker1.py' in the job"
    waiting.wait_line(rf"waiting: 1/2 .*not in the job: .*{host} \(refused: --nnodes is 3:3 there and 2:2 in the job")
    waiting.wait_line(rf"waiting: 1/2 nodes .* {host} \(refused: {script_told}: nodes of one role run the same script")
