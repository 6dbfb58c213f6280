"""What an agent puts before its workers: each mode's port, its renewal, and its end."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store.tcpstore import wire, worker_store
from elastic_run.store.tcpstore.listener import PortTakenError, open_listener
from elastic_run.store.tcpstore.worker_store import choose_loopback, choose_worker_store, open_worker_store
from tests.support.processes import children_of, is_gone, wait_gone
from tests.support.sessions import free_port
from tests.support.store import LOOPBACK, Peer
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_run.store.tcpstore.worker_store import WorkerStore


class Desk:
    """An agent's loop with its stores."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.unknown: list[int] = []
        self.lost: list[str] = []
        self.stores: list[WorkerStore] = []
        self.peers: list[Peer] = []

    def open(self, mode: str, port: int | None = None, python: str = sys.executable) -> WorkerStore:
        """Open a store."""
        store = open_worker_store(
            mode,
            port=port,
            python=python,
            env=os.environ,
            on_unknown_operation=self.unknown.append,
            on_lost=self.lost.append,
        )
        self.stores.append(store)
        store.serve(self.loop)
        return store

    def renew(self, store: WorkerStore) -> WorkerStore:
        """Renew a store."""
        self.stores.append(store.renew())
        return self.stores[-1]

    def connect(self, store: WorkerStore) -> Peer:
        """Connect to a store."""
        self.peers.append(Peer(self.loop, store.port))
        return self.peers[-1]

    def count(self, store: WorkerStore) -> int:
        """Connect to a store and count a key up."""
        peer = self.connect(store)
        peer.ask(wire.ADD, b"/n", 1)
        number = peer.take_number()
        peer.close()
        return number

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turn the loop until a condition holds."""
        assert self.loop.run_until(is_done, self.loop.now() + DEADLINE)


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Give an agent's loop."""
    with Loop() as loop:
        desk = Desk(loop)
        yield desk
        for peer in desk.peers:
            peer.close()
        for store in desk.stores:
            store.close()
        desk.turn_until(lambda: not loop._children)


def is_open(port: int) -> bool:
    """Tell whether somebody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


@pytest.mark.parametrize(
    ("requested", "workers", "env", "mode"),
    [
        ("auto", 1, {}, "agent"),
        ("auto", 512, {}, "agent"),
        ("auto", 513, {}, "torch"),
        ("auto", 2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "rank0"),
        ("auto", 2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}, "agent"),
        ("torch", 2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "torch"),
        ("agent", 1000, {}, "agent"),
    ],
)
def test_the_mode_is_chosen_by_width_and_environment(
    requested: str, workers: int, env: dict[str, str], mode: str
) -> None:
    """Auto is the agent's server up to 512 workers, torch's above, rank 0's where torch's variable says so."""
    assert choose_worker_store(requested, workers, env) == mode


def test_an_unknown_mode_is_refused(desk: Desk) -> None:
    """A mode that doesn't exist is named, with those that do."""
    with pytest.raises(ValueError, match="'etcd' is not one of agent, torch, rank0"):
        desk.open("etcd")


@pytest.mark.parametrize("mode", ["agent", "torch", "rank0"])
def test_what_workers_are_told(desk: Desk, mode: str) -> None:
    """Each mode names its loopback address, its port, and whether the store is served already."""
    store = desk.open(mode)
    host = LOOPBACK if mode == "torch" else choose_loopback()[0]
    assert (store.mode, store.host, store.use_agent_store) == (mode, host, mode != "rank0")
    assert 0 < store.port < 65536


@pytest.mark.parametrize("mode", ["agent", "rank0"])
def test_a_new_round_has_a_new_port(desk: Desk, mode: str) -> None:
    """Renewed without a fixed port a store has another port, and the old one is given back."""
    store = desk.open(mode)
    following = desk.renew(store)
    assert following.port != store.port
    open_listener(LOOPBACK, store.port).close()


@pytest.mark.parametrize("mode", ["agent", "rank0", "torch"])
def test_a_fixed_port_stays(desk: Desk, mode: str) -> None:
    """Renewed with a fixed port a store keeps it."""
    port = free_port()
    store = desk.open(mode, port)
    for _ in range(3):
        assert store.port == port
        store = desk.renew(store)


def test_a_round_sees_nothing_of_the_last(desk: Desk) -> None:
    """In the agent's store no key and no connection passes from one round to the next, on a fixed port too."""
    for port in (None, free_port()):
        store = desk.open("agent", port)
        old = desk.connect(store)
        assert desk.count(store) == 1
        assert desk.count(store) == 2
        store = desk.renew(store)
        old.wait_closed()
        assert desk.count(store) == 1


def test_the_agents_store_tells_of_unknown_operations(desk: Desk) -> None:
    """An operation that our server doesn't know is passed on, once in each round."""
    store = desk.open("agent")
    for _ in range(2):
        for _ in range(2):
            peer = desk.connect(store)
            peer.send(b"\x77")
            peer.wait_closed()
        store = desk.renew(store)
    assert desk.unknown == [0x77, 0x77]


@pytest.mark.parametrize("mode", ["agent", "torch", "rank0"])
def test_a_taken_port_names_its_owner(desk: Desk, mode: str) -> None:
    """A fixed port on which somebody listens is refused, with the owner's pid and name."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as caught:
            desk.open(mode, port)
        assert caught.value.port == port
        assert f"port {port} is taken by pid {os.getpid()} (" in str(caught.value)


def test_an_address_of_another_machine_is_an_error() -> None:
    """Where the system refuses to listen, the error says where."""
    with pytest.raises(OSError, match=r"can't listen on 192\.0\.2\.1: Cannot assign"):
        open_listener("192.0.2.1")


# --- rank0 ---------------------------------------------------------------------------------------------------------
def test_a_kept_port_is_given_to_nobody_else(desk: Desk) -> None:
    """The port kept for rank 0 refuses connections, and is never chosen for others who ask for any port."""
    store = desk.open("rank0")
    assert not is_open(store.port)
    for _ in range(2000):
        with socket.socket() as other:
            other.bind(("", 0))
            assert other.getsockname()[1] != store.port


def test_a_kept_port_can_be_listened_on_by_rank_0(desk: Desk) -> None:
    """With SO_REUSEADDR, as torch sets it, another socket can listen on the kept port, on all addresses."""
    store = desk.open("rank0")
    with socket.socket(socket.AF_INET6) as rank0:
        rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank0.bind(("::", store.port))
        rank0.listen()
        assert is_open(store.port)


# --- torch ---------------------------------------------------------------------------------------------------------
def test_torchs_server_serves_and_ends_with_its_round(desk: Desk) -> None:
    """Torch's server has a child for each round, serves whoever connected before it was up, and ends when renewed."""
    store = desk.open("torch", free_port())
    children = []
    for _ in range(2):
        assert desk.count(store) == 1
        assert desk.count(store) == 2
        children += children_of(os.getpid())
        store = desk.renew(store)
    assert len(set(children)) == 2
    desk.turn_until(lambda: len(desk.loop._children) <= 1)
    assert all(is_gone(pid) for pid in children)
    assert desk.lost == []


def test_torchs_server_has_a_bound_of_memory(desk: Desk) -> None:
    """Whoever makes torch's server copy gigabytes ends that process, whose successor is ours, and not the machine."""
    store = desk.open("torch")
    assert desk.count(store) == 1
    (pid,) = children_of(os.getpid())
    limits = wait_until(lambda: re.search(r"Max data size +(\d+)", Path(f"/proc/{pid}/limits").read_text()))
    assert limits is not None
    assert 4 << 30 < int(limits[1]) < 64 << 30


def test_torchs_server_has_a_session_and_nothing_of_ours(desk: Desk) -> None:
    """The child is out of reach of the terminal's signals and holds no descriptor but its pipes, null and the port."""
    desk.open("torch")
    (pid,) = children_of(os.getpid())
    assert os.getsid(pid) == pid
    wait_until(lambda: "torch_child" in Path(f"/proc/{pid}/cmdline").read_text())
    links = [str(Path(f"/proc/{pid}/fd/{fd}").readlink()).split(":")[0] for fd in range(4)]
    assert links == ["pipe", "/dev/null", "pipe", "socket"]


@pytest.mark.parametrize("python", ["/bin/false", "/nonexistent/python"])
def test_without_torchs_server_ours_takes_over(desk: Desk, python: str) -> None:
    """When the child can't start or dies, the agent serves the same port itself and says why in one line."""
    store = desk.open("torch", python=python)
    assert desk.count(store) == 1
    (line,) = desk.lost
    assert "in the agent instead" in line
    assert "\n" not in line
    assert desk.count(desk.renew(store)) == 1


def list_descriptors() -> set[str]:
    """Return this process's open descriptors."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("python", [sys.executable, "/nonexistent/python"])
@pytest.mark.parametrize("pipes", [2, 1])
def test_torchs_server_leaves_no_descriptor_open(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, python: str, pipes: int
) -> None:
    """Whether its child runs, can't be started, or has no pipe: a job has many rounds."""
    make_pipe = os.pipe
    made: list[tuple[int, int]] = []

    def make_pipe_or_fail() -> tuple[int, int]:
        if len(made) == pipes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(make_pipe())
        return made[-1]

    before = list_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", make_pipe_or_fail)
        store = desk.open("torch", python=python)
    assert len(made) == pipes
    store.close()
    desk.turn_until(lambda: not desk.loop._children)
    assert list_descriptors() == before


def test_a_child_that_fails_says_why(desk: Desk, tmp_path: Path) -> None:
    """The last line of the child's stderr is in the line about its end."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ModuleNotFoundError: no torch here >&2\nexit 3\n")
    python.chmod(0o755)
    desk.open("torch", python=str(python))
    desk.turn_until(lambda: bool(desk.lost))
    assert "ended with 3: ModuleNotFoundError: no torch here" in desk.lost[0]


@pytest.mark.parametrize("moment", ["importing", "serving"])
def test_torchs_server_dies_with_the_agent(moment: str) -> None:
    """However early or late the agent is killed, torch's server goes at once."""
    program = f"""
import os, sys
from elastic_run.loop import Loop
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.worker_store import open_worker_store
loop = Loop()
store = open_worker_store("torch", port=None, python=sys.executable, env=os.environ)
store.serve(loop)
if {moment!r} == "serving":
    StoreClient("127.0.0.1", store.port, 30).close()
print("ready", flush=True)
loop.run_until(lambda: False)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        (child,) = children_of(agent.pid)
        if moment == "importing":
            wait_until(lambda: "torch" in Path(f"/proc/{child}/maps").read_text())
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        wait_gone(child, deadline=2.0)


def test_a_store_to_which_nobody_came_leaves_nothing_in_its_loop(desk: Desk) -> None:
    """The number of its descriptor may be that of another file soon."""
    before = dict(desk.loop._readers)
    desk.open("agent").close()
    assert desk.loop._readers == before


@pytest.mark.parametrize(
    ("hosts", "interfaces", "name", "addresses"),
    [
        ("127.0.0.1 localhost\n", "", "localhost", (LOOPBACK,)),
        (
            "127.0.0.1\tlocalhost\n::1 localhost ip6-localhost # ::1\n",
            "01 80 10 80 lo\n",
            "localhost",
            (LOOPBACK, "::1"),
        ),
        ("127.0.0.1 localhost\n::1 localhost\n", "", LOOPBACK, (LOOPBACK,)),
        ("127.0.0.1 other # localhost\n", "01 80 10 80 lo\n", LOOPBACK, (LOOPBACK,)),
        (None, "", LOOPBACK, (LOOPBACK,)),
    ],
    ids=["one", "both", "no IPv6", "another name", "no file"],
)
def test_a_job_on_one_node_has_the_name_localhost(
    hosts: str | None, interfaces: str, name: str, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    """The store listens at all addresses of the name; where it can't, its address is a number."""
    for path, text in (("etc/hosts", hosts), ("proc/net/if_inet6", interfaces)):
        if text is not None:
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(text, encoding="ascii")
    assert choose_loopback(f"{tmp_path}/") == (name, addresses)


def test_a_store_of_two_addresses_answers_at_both(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of either address have one store, also in the next round."""
    monkeypatch.setattr(worker_store, "choose_loopback", lambda: ("localhost", ("127.0.0.1", "127.0.0.2")))
    store = desk.open("agent")
    for _ in range(2):
        assert store.host == "localhost"
        assert desk.count(store) == 1
        peer = Peer(desk.loop, store.port, host="127.0.0.2")
        desk.peers.append(peer)
        peer.ask(wire.ADD, b"/n", 1)
        assert peer.take_number() == 2
        store = desk.renew(store)
