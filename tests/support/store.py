"""Stores for tests: raw connections to a server on the test's own loop, and a server with a thread of its own."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store import wire
from elastic_run.store.errors import GARBAGE, UNKNOWN
from elastic_run.store.memory_store import MemoryStore
from elastic_run.store.server import StoreServer
from elastic_run.store.worker_store import open_listeners
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType


NONCE = 0x1234
LOOPBACK = "127.0.0.1"


class Peer:
    """A raw connection to a server on the same loop: no thread, nothing left to chance.

    Args:
        loop: The server's loop, which also reads this end.
        port: The server's port.
        greets: Whether to open the connection as a TCPStore client does.
        host: The server's address.
    """

    def __init__(self, loop: Loop, port: int, *, greets: bool = True, host: str = LOOPBACK) -> None:
        self.received = bytearray()
        self.is_closed = False
        self._loop = loop
        self.socket = socket.create_connection((host, port), timeout=DEADLINE)
        self.socket.settimeout(0)
        self.read_on()
        if greets:
            self.send(wire.encode_opening(NONCE))
            assert self.take(4) == wire.U32.pack(NONCE)

    def send(self, data: bytes) -> None:
        """Send bytes; the loop turns while the server has to make room."""
        left = memoryview(data)

        def write() -> None:
            nonlocal left
            try:
                left = left[self.socket.send(left) :]
            except ConnectionError:
                left = left[:0]

        self._loop.add_writer(self.socket.fileno(), write)
        self.turn_until(lambda: not left)
        self._loop.remove_writer(self.socket.fileno())

    def ask(self, operation: int, *fields: bytes | int) -> None:
        """Send one message."""
        self.send(wire.encode(operation, *fields))

    def take(self, size: int) -> bytes:
        """Turn the loop until so many bytes have come, and take them."""
        self.turn_until(lambda: len(self.received) >= size or self.is_closed)
        assert len(self.received) >= size, f"closed after {self.received!r}"
        taken = bytes(self.received[:size])
        del self.received[:size]
        return taken

    def take_string(self) -> bytes:
        """Take a string."""
        return self.take(wire.U64.unpack(self.take(8))[0])

    def take_number(self) -> int:
        """Take a number."""
        number: int = wire.I64.unpack(self.take(8))[0]
        return number

    def wait_closed(self) -> bytes:
        """Turn the loop until the server has closed the connection; returns what came before."""
        self.turn_until(lambda: self.is_closed)
        return bytes(self.received)

    def assert_silent(self) -> None:
        """Assert that the server has sent nothing: a PING's reply is the first thing that comes."""
        assert not self.received
        self.send(bytes((wire.PING,)) + wire.U32.pack(77))
        assert self.take(4) == wire.U32.pack(77)

    def stop_reading(self) -> None:
        """Leave what comes in the kernel's buffers."""
        self._loop.remove_reader(self.socket.fileno())

    def read_on(self) -> None:
        """Read what comes."""
        self._loop.add_reader(self.socket.fileno(), self._read)

    def close(self) -> None:
        """Hang up; harmless when closed."""
        if self.socket.fileno() >= 0:
            self.stop_reading()
            self.socket.close()

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turn the loop until a condition holds."""
        assert self._loop.run_until(is_done, self._loop.now() + DEADLINE), "not in time"

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self.received += data
        if not data:
            self.is_closed = True
            self.stop_reading()


class ServedStore:
    """A store served by a loop in a thread of its own, for clients that block.

    Attributes:
        port: Where it is.
        unknown: The unknown operations for which clients have asked.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._loop = Loop()
        self._server = StoreServer(self._loop, open_listeners([LOOPBACK])[0], on_refusal=self._refuse)
        self.port = self._server.address[1]
        self._is_over = False
        self._thread = threading.Thread(target=self._loop.run_until, args=(lambda: self._is_over,))

    def __enter__(self) -> ServedStore:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(DEADLINE)
        self._server.close()
        self._loop.close()

    def reset(self) -> None:
        """Begin a round: empty the workers' store."""
        is_done = threading.Event()

        def reset() -> None:
            self._server.reset()
            is_done.set()

        self._loop.call_soon_threadsafe(reset)
        assert is_done.wait(DEADLINE)

    def _refuse(self, kind: str, what: str) -> None:
        if kind == UNKNOWN:
            self.unknown.append(what)

    def _end(self) -> None:
        self._is_over = True


# --- the store's server on a loop that a test turns: the fixtures `bench` and `small` ---------------------------------
class Bench:
    """A server, its data, and the peers of a test."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.data = MemoryStore()
        self.listener = open_listeners([LOOPBACK])[0]
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
    monkeypatch.setattr("elastic_run.store.server.measure", lambda _: measure)
    return measure
