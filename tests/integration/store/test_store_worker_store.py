"""What an agent puts before its workers: each mode's port, its renewal, and its end."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store import wire, worker_store
from elastic_run.store.errors import UNKNOWN
from elastic_run.store.worker_store import (
    PortTakenError,
    choose_loopback,
    is_served_by_agent,
    open_listeners,
    open_worker_store,
)
from tests.support.sessions import free_port
from tests.support.store import LOOPBACK, Peer
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elastic_run.store.worker_store import WorkerStore


class Desk:
    """An agent's loop with its stores."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.unknown: list[str] = []
        self.stores: list[WorkerStore] = []
        self.peers: list[Peer] = []

    def open(self, mode: str, port: int | None = None) -> WorkerStore:
        """Open a store."""
        store = open_worker_store(by_agent=mode == "agent", port=port, on_refusal=self._refuse)
        self.stores.append(store)
        store.serve(self.loop)
        return store

    def _refuse(self, kind: str, what: str) -> None:
        if kind == UNKNOWN:
            self.unknown.append(what.partition(": ")[2])

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


def is_open(port: int) -> bool:
    """Tell whether somebody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


@pytest.mark.parametrize(
    ("requested", "env", "by_agent"),
    [
        ("auto", {}, True),
        ("auto", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ("auto", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}, True),
        ("agent", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, True),
        ("rank0", {}, False),
        ("torch", {}, False),
    ],
)
def test_the_flag_and_torchs_variable_choose(requested: str, env: dict[str, str], by_agent: bool) -> None:
    """Auto is the agent's server, or rank 0's if torch's variable says so."""
    assert is_served_by_agent(requested, env) == by_agent


@pytest.mark.parametrize("mode", ["agent", "rank0"])
def test_what_workers_are_told(desk: Desk, mode: str) -> None:
    """Each mode names its loopback address, its port, and whether the store is served already."""
    store = desk.open(mode)
    assert (store.host, store.use_agent_store) == (choose_loopback()[0], mode == "agent")
    assert 0 < store.port < 65536


@pytest.mark.parametrize("mode", ["agent", "rank0"])
def test_a_new_round_has_a_new_port(desk: Desk, mode: str) -> None:
    """Renewed without a fixed port a store has another port, and the old one is given back."""
    store = desk.open(mode)
    following = desk.renew(store)
    assert following.port != store.port
    open_listeners([LOOPBACK], store.port)[0].close()


@pytest.mark.parametrize("mode", ["agent", "rank0"])
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
    assert desk.unknown == ["operation 119 is unknown to this store"] * 2


@pytest.mark.parametrize("mode", ["agent", "rank0"])
def test_a_taken_port_names_its_owner(desk: Desk, mode: str) -> None:
    """A fixed port on which somebody listens is refused, with the owner's pid and name."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as caught:
            desk.open(mode, port)
        assert caught.value.port == port
        assert f"port {port} is taken by pid {os.getpid()} (" in str(caught.value)


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
