"""The store's server on a loop that a test turns, with the peers of the test: the fixtures `bench` and `small`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store.errors import GARBAGE
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.listener import open_listener
from elastic_run.store.tcpstore.memory_store import MemoryStore
from elastic_run.store.tcpstore.server import StoreServer
from tests.support.store import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Bench:
    """A server, its data, and the peers of a test."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.data = MemoryStore()
        self.listener = open_listener()
        self.refusals: list[str] = []
        self.server = StoreServer(loop, self.listener, self.data, on_refusal=self._refuse)
        self.peers: list[Peer] = []

    def _refuse(self, kind: str, what: str) -> None:
        if kind != GARBAGE:
            self.refusals.append(what)

    def peer(self, *, greets: bool = True) -> Peer:
        """Connect."""
        peer = Peer(self.loop, self.server.address[1], greets=greets)
        self.peers.append(peer)
        return peer

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turn the loop until a condition holds."""
        assert self.loop.run_until(is_done, self.loop.now() + 30)

    def assert_healthy(self) -> None:
        """Assert that a client is served and that no other is kept."""
        with_key = self.peer()
        with_key.ask(wire.SET, b"/healthy", b"yes")
        with_key.ask(wire.GET, b"/healthy")
        assert with_key.take_string() == b"yes"


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Give a server on a loop that the test turns."""
    with Loop() as loop:
        bench = Bench(loop)
        yield bench
        for peer in bench.peers:
            peer.close()
        bench.server.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give servers a small measure, for tests that pass it: returns its bytes."""
    measure = 32 << 20
    monkeypatch.setattr("elastic_run.store.tcpstore.server.measure", lambda _: measure)
    return measure
