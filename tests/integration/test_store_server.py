"""The store's server against raw sockets: whatever comes over the port, and however slowly."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store import wire
from elastic_run.store.memory import MemoryStore
from elastic_run.store.server import GARBAGE, StoreServer, open_listener
from tests.support.store import NONCE, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


def noise(seed: int, size: int) -> bytes:
    """Return bytes that look random and are the same each time."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - a test's noise, no secret


class Bench:
    """A server, its data, and the peers of a test."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.data = MemoryStore()
        self.unknown: list[int] = []
        self.listener = open_listener()
        self.refusals: list[str] = []
        self.server = StoreServer(loop, self.listener, self.data, self.unknown.append, on_refusal=self._refuse)
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

    def wait_backlogs(self, count: int) -> None:
        """Wait until so many clients have a reply that they don't read."""
        self.turn_until(lambda: sum(connection._queued > 0 for connection in self.server._connections) == count)

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


# --- the opening ---------------------------------------------------------------------------------------------------
def test_a_client_gets_its_nonce_back(bench: Bench) -> None:
    """The opening is answered with the client's own number, also when it comes byte by byte."""
    peer = bench.peer(greets=False)
    for byte in wire.encode_opening(NONCE):
        peer.send(bytes((byte,)))
    assert peer.take(4) == wire.U32.pack(NONCE)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00" * 64,
        b"\xff" * 64,
        wire.encode(wire.SET, b"/k", b"v"),
        bytes((wire.VALIDATE,)) + wire.U32.pack(wire.MAGIC ^ 1),
        *(noise(seed, 5000) for seed in range(8)),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_stranger_is_closed_and_harms_nothing(bench: Bench, garbage: bytes) -> None:
    """What isn't a TCPStore client is closed without a reply, without a trace and without a word to the owner."""
    client = bench.peer()
    stranger = bench.peer(greets=False)
    stranger.send(garbage)
    assert stranger.wait_closed() == b""
    client.assert_silent()
    assert (bench.data.list_keys(), bench.unknown, len(bench.server._connections)) == ([], [], 1)


def test_a_client_that_turns_to_garbage_is_closed(bench: Bench) -> None:
    """Random bytes behind a proper opening end that connection or wait for more; the server goes on."""
    for seed in range(50):
        peer = bench.peer()
        peer.send(noise(seed, 300))
        peer.close()
    bench.assert_healthy()


@pytest.mark.parametrize(
    "message",
    [
        bytes((wire.SET,)) + wire.U64.pack(wire.KEY_LIMIT + 1),
        bytes((wire.SET,)) + wire.U64.pack(2) + b"/k" + wire.U64.pack(wire.VALUE_LIMIT + 1),
        bytes((wire.WAIT,)) + wire.U64.pack(wire.COUNT_LIMIT + 1),
        bytes((wire.MULTI_SET,)) + wire.U64.pack(2**64 - 1),
    ],
    ids=["key", "value", "list", "endless list"],
)
def test_what_is_too_long_is_refused_before_it_comes(bench: Bench, message: bytes) -> None:
    """A string or list over its limit closes the connection when its length is known."""
    peer = bench.peer()
    peer.send(message)
    assert peer.wait_closed() == b""
    bench.assert_healthy()


def test_what_came_before_an_error_is_answered(bench: Bench) -> None:
    """Replies to proper messages reach the client also when the next message closes the connection."""
    peer = bench.peer()
    peer.send(wire.encode(wire.ADD, b"/n", 5) + wire.encode(wire.SET, b"/t", b"x") + wire.encode(wire.ADD, b"/t", 1))
    assert peer.wait_closed() == wire.I64.pack(5)
    assert bench.unknown == []


def test_an_unknown_operation_is_told_once(bench: Bench) -> None:
    """A client that asks for what we don't know is closed, and the owner hears of it once, with the number."""
    for operation in (42, 42, 99):
        peer = bench.peer()
        peer.send(bytes((operation,)))
        peer.wait_closed()
    assert bench.unknown == [42]
    bench.server.reset()
    peer = bench.peer()
    peer.send(bytes((99,)))
    peer.wait_closed()
    assert bench.unknown == [42, 99]


# --- slow and halting clients --------------------------------------------------------------------------------------
def test_half_a_message_does_nothing(bench: Bench) -> None:
    """A message that never ends has no effect, and its client's end is noticed."""
    peer = bench.peer()
    peer.send(wire.encode(wire.MULTI_SET, 2, b"/a", b"1", b"/b", b"2")[:-1])
    peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    assert bench.data.num_keys() == 0


def test_messages_in_one_packet_are_answered_in_order(bench: Bench) -> None:
    """A thousand messages that arrive together get their replies in order."""
    peer = bench.peer()
    peer.send(b"".join(wire.encode(wire.ADD, b"/n", 1) for _ in range(1000)))
    assert [peer.take_number() for _ in range(1000)] == list(range(1, 1001))


def test_a_slow_reader_is_not_read_on(bench: Bench) -> None:
    """A client that asks for much and reads nothing makes the server hold one reply, and gets all in the end."""
    bench.data.set(b"/big", b"x" * (4 * MIB))
    slow = bench.peer()
    slow.stop_reading()
    slow.send(wire.encode(wire.GET, b"/big") * 20)
    connection = next(iter(bench.server._connections))
    bench.turn_until(lambda: connection._is_held)
    for _ in range(20):
        bench.peer().assert_silent()
    assert connection._queued < 8 * MIB
    slow.read_on()
    for _ in range(20):
        assert slow.take_string() == b"x" * (4 * MIB)
    slow.assert_silent()


def test_a_slow_writer_is_read_to_the_end(bench: Bench) -> None:
    """A large value that comes in small pieces, between other clients' messages, arrives whole."""
    value = noise(1, MIB)
    slow, other = bench.peer(), bench.peer()
    message = wire.encode(wire.SET, b"/big", value)
    for start in range(0, len(message), 50_000):
        slow.send(message[start : start + 50_000])
        other.ask(wire.ADD, b"/n", 1)
        other.take_number()
    slow.ask(wire.GET, b"/big")
    assert slow.take_string() == value


def test_largest_values_in_one_reply(bench: Bench) -> None:
    """MULTI_GET of several values of 8 MiB gives each of them whole."""
    values = [noise(seed, 8 * MIB) for seed in range(3)]
    peer = bench.peer()
    for number, value in enumerate(values):
        peer.ask(wire.SET, b"/%d" % number, value)
    peer.ask(wire.MULTI_GET, 4, b"/0", b"/1", b"/no", b"/2")
    assert [peer.take_string() for _ in range(4)] == [values[0], values[1], b"", values[2]]


def test_many_keys_in_one_message(bench: Bench) -> None:
    """A list of as many keys as the protocol allows is set, got and listed."""
    keys = [b"/%d" % number for number in range(wire.COUNT_LIMIT)]
    peer = bench.peer()
    peer.ask(wire.MULTI_SET, len(keys), *(part for key in keys for part in (key, key)))
    peer.ask(wire.MULTI_GET, len(keys), *keys)
    expected = b"".join(wire.U64.pack(len(key)) + key for key in keys)
    assert peer.take(len(expected)) == expected
    peer.ask(wire.LIST_KEYS)
    assert peer.take_number() == len(keys)
    assert peer.take(len(expected)) == expected


def test_a_client_that_dies_while_written_to_harms_nobody(bench: Bench) -> None:
    """A reset connection with replies under way is dropped."""
    bench.data.set(b"/big", b"x" * (8 * MIB))
    peer = bench.peer()
    peer.stop_reading()
    peer.send(wire.encode(wire.GET, b"/big") * 3)
    peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    bench.assert_healthy()


# --- bounds --------------------------------------------------------------------------------------------------------
@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give servers a small measure, for tests that pass it: returns its bytes."""
    measure = 32 * MIB
    monkeypatch.setattr("elastic_run.store.server.measure", lambda _: measure)
    return measure


def test_one_value_many_times_is_one_value(bench: Bench) -> None:
    """A reply that names one large value many times refers to it, and takes no memory of its own for each."""
    peer = bench.peer()
    peer.stop_reading()
    peer.send(wire.encode(wire.SET, b"/k", b"x" * (8 * MIB)) + wire.encode(wire.APPEND, b"/k", b"y" * 20_000))
    peer.send(wire.encode(wire.MULTI_GET, 30, *[b"/k"] * 30))
    connection = next(iter(bench.server._connections))
    bench.turn_until(lambda: connection._queued > 0)
    assert connection._queued > 200 * MIB
    assert len({id(part) for part in connection._queue if len(part) > MIB}) <= 2  # the value, and what is left of it
    assert connection.held < MIB


@pytest.mark.parametrize(
    ("messages", "bound"),
    [
        ([wire.encode(wire.MULTI_GET, 5, *[b"/big"] * 5)], "a reply of 41943040 bytes"),
        ([wire.encode(wire.SET, b"/%d" % number, bytes(8 * MIB)) for number in range(5)], "the store holds"),
        ([wire.encode(wire.APPEND, b"/k", bytes(8 * MIB)) for _ in range(5)], "the store holds"),
        ([wire.encode(wire.QUEUE_PUSH, b"/q", bytes(8 * MIB)) for _ in range(5)], "the store holds"),
        ([wire.encode(wire.SET, b"/k", bytes(8 * MIB + 1))], "a string of 8388609 bytes"),
    ],
    ids=["reply", "values", "one value that grows", "queue", "string"],
)
def test_a_bound_ends_the_connection_and_is_told_once(
    small: int, bench: Bench, messages: list[bytes], bound: str
) -> None:
    """Whoever passes a bound is closed, again and again; one line says which bound it was and for whom."""
    bench.data.set(b"/big", bytes(8 * MIB))
    for _ in range(2):
        peer = bench.peer()
        address = "{}:{}".format(*peer.socket.getsockname())
        for message in messages:
            peer.send(message)
        peer.wait_closed()
        (line,) = bench.refusals
        assert bound in line
        assert (address in line) == (len(bench.peers) == 1)
        assert bench.data.size <= small
    bench.data.clear()
    bench.assert_healthy()


@pytest.mark.usefixtures("small")
def test_values_that_only_replies_have_still_count(bench: Bench) -> None:
    """A client cannot make the server hold more by not reading values that are replaced meanwhile."""
    writer = bench.peer()
    for number in range(1, 5):
        writer.send(wire.encode(wire.SET, b"/k", bytes(8 * MIB)))
        writer.assert_silent()
        slow = bench.peer()
        slow.stop_reading()
        slow.send(wire.encode(wire.MULTI_GET, 4, *[b"/k"] * 4))
        bench.wait_backlogs(number)
    writer.send(wire.encode(wire.SET, b"/k", bytes(8 * MIB)))
    writer.wait_closed()
    assert "the store holds" in bench.refusals[0]
    for peer in bench.peers:
        peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    bench.assert_healthy()


def test_a_value_that_grows_is_held_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies that nobody reads hold no former states of a value that has grown meanwhile."""
    monkeypatch.setattr("elastic_run.store.connection._HIGH_WATER", 64 * MIB)
    writer, slow = bench.peer(), bench.peer()
    slow.stop_reading()
    slow.send(wire.encode(wire.SET, b"/large", bytes(8 * MIB)) + wire.encode(wire.GET, b"/large"))
    bench.wait_backlogs(1)
    connection = next(one for one in bench.server._connections if one._queued)
    writer.ask(wire.SET, b"/k", b"x" * 4000)
    for _ in range(10):
        writer.ask(wire.APPEND, b"/k", b"y")
        writer.assert_silent()
        slow.ask(wire.GET, b"/k")
        writer.assert_silent()
    grown = {id(part): len(part) for part in connection._queue if isinstance(part, bytes) and len(part) < MIB}
    assert sum(grown.values()) < 8000


def test_all_loopback_addresses_are_one_host(bench: Bench) -> None:
    """A program of this machine cannot raise the bounds by coming from many loopback addresses."""
    bench.peer()
    limit = bench.server._holdings.limit
    for number in range(2, 12):
        with socket.create_connection(("127.0.0.1", bench.server.address[1]), source_address=(f"127.0.0.{number}", 0)):
            bench.turn_until(lambda: len(bench.server._connections) == 2)
            assert bench.server._holdings.limit == limit
        bench.turn_until(lambda: len(bench.server._connections) == 1)


def test_small_strings_count_what_they_take(bench: Bench) -> None:
    """A list of small strings that is not finished counts with what it takes in memory, not with its bytes alone."""
    peer = bench.peer()
    peer.send(bytes((wire.MULTI_SET,)) + wire.U64.pack(50_000) + (wire.U64.pack(2) + b"ab") * 99_999)
    (connection,) = bench.server._connections
    bench.turn_until(lambda: connection.held > 99_000 * (sys.getsizeof(b"ab") + 8 + 8))


@pytest.mark.usefixtures("small")
def test_unfinished_messages_together_are_bounded(bench: Bench) -> None:
    """Of all that send large messages and never finish them, the largest is closed when all take too much."""
    begun = bytes((wire.MULTI_SET,)) + wire.U64.pack(100)
    pair = wire.U64.pack(2) + b"/k" + wire.U64.pack(8 * MIB) + bytes(8 * MIB)
    small, large = bench.peer(), bench.peer()
    small.send(begun + pair)
    large.send(begun + 4 * pair)
    assert large.wait_closed() == b""
    assert "unfinished messages" in bench.refusals[0]
    small.send(wire.U64.pack(2) + b"/k")
    assert not small.is_closed
    small.close()
    bench.turn_until(lambda: not bench.server._connections)
    assert bench.server._holdings.total == 0


@pytest.mark.usefixtures("small")
def test_waits_are_bounded(bench: Bench) -> None:
    """What is waited for is bounded for all clients together; whoever leaves gives it back."""
    keys = [b"/%08d" % number for number in range(wire.COUNT_LIMIT)]
    message = wire.encode(wire.WAIT, len(keys), *keys)
    for _ in range(2):
        bench.peer().send(message)
    bench.turn_until(lambda: bool(bench.refusals))
    assert "waits hold" in bench.refusals[0]
    for peer in bench.peers:
        peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    assert (bench.data._waits.size, bench.data._waits.by_key) == (0, {})


@pytest.mark.parametrize("error", [MemoryError(), KeyError("a defect")], ids=repr)
def test_a_defect_ends_one_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """When serving one client fails in whatever way, that client is closed, others are served, and one line says it."""

    def fail(*_: object) -> None:
        raise error

    other = bench.peer()
    with monkeypatch.context() as patch:
        patch.setattr(bench.data, "list_keys", fail)
        for _ in range(3):
            peer = bench.peer()
            peer.ask(wire.LIST_KEYS)
            assert peer.wait_closed() == b""
    other.assert_silent()
    (line,) = bench.refusals
    assert type(error).__name__ in line


def test_a_defect_of_one_that_waits_does_not_end_the_one_that_sets(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that can't be told the end of its wait is closed; whoever set the key is served on."""
    waiting, setting = bench.peer(), bench.peer()
    waiting.ask(wire.WAIT, 1, b"/k")
    waiting.assert_silent()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("elastic_run.store.connection.Connection.flush", fail)
        setting.send(wire.encode(wire.SET, b"/k", b"v"))
        waiting.wait_closed()
    setting.close()
    bench.assert_healthy()
    (line,) = bench.refusals
    assert "MemoryError" in line


# --- waits ---------------------------------------------------------------------------------------------------------
def test_a_wait_ends_when_the_last_key_is_there(bench: Bench) -> None:
    """WAIT is answered when every key is there, and not before."""
    waiting, setting = bench.peer(), bench.peer()
    waiting.ask(wire.WAIT, 2, b"/a", b"/b")
    setting.ask(wire.SET, b"/a", b"")
    setting.assert_silent()
    waiting.assert_silent()
    setting.ask(wire.SET, b"/b", b"")
    assert waiting.take(1) == wire.WAIT_OVER
    waiting.assert_silent()


def test_a_cancelled_wait_is_answered_once(bench: Bench) -> None:
    """CANCEL_WAIT of a wait under way is answered with 1, and the keys' appearance with nothing."""
    peer = bench.peer()
    peer.ask(wire.WAIT, 1, b"/k")
    peer.ask(wire.CANCEL_WAIT)
    assert peer.take(1) == wire.WAIT_CANCELLED
    peer.ask(wire.SET, b"/k", b"")
    peer.assert_silent()


def test_a_cancellation_that_crossed_is_answered_too(bench: Bench) -> None:
    """CANCEL_WAIT behind the wait's own end gives 0, then 1, which is what torch's client expects of the race."""
    peer, other = bench.peer(), bench.peer()
    peer.ask(wire.WAIT, 1, b"/k")
    peer.assert_silent()
    other.ask(wire.SET, b"/k", b"")
    other.assert_silent()
    peer.ask(wire.CANCEL_WAIT)
    assert peer.take(2) == wire.WAIT_OVER + wire.WAIT_CANCELLED
    peer.assert_silent()


def test_a_wait_within_a_wait_is_refused(bench: Bench) -> None:
    """A client that waits twice at once could not tell the answers apart, and is closed."""
    for second in (wire.encode(wire.WAIT, 1, b"/b"), wire.encode(wire.BARRIER, b"/b", 2)):
        peer = bench.peer()
        peer.send(wire.encode(wire.WAIT, 1, b"/a") + second)
        assert peer.wait_closed() == b""


def test_who_leaves_waits_no_longer(bench: Bench) -> None:
    """A client that disconnects while it waits leaves nothing behind."""
    peer = bench.peer()
    peer.ask(wire.WAIT, 1000, *(b"/%d" % number for number in range(1000)))
    peer.assert_silent()
    peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    assert bench.data._waits.by_key == {}


def test_a_thousand_waiters_are_woken(bench: Bench) -> None:
    """A thousand clients that wait for one key are all woken by one SET."""
    needed = 2 * 1000 + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, hard)), hard))
    try:
        peers = [bench.peer() for _ in range(1000)]
        for peer in peers:
            peer.ask(wire.WAIT, 1, b"/go")
        peers[-1].ask(wire.CANCEL_WAIT)
        assert peers[-1].take(1) == wire.WAIT_CANCELLED
        peers[-1].ask(wire.SET, b"/go", b"")
        assert [peer.take(1) for peer in peers[:-1]] == [wire.WAIT_OVER] * 999
        peers[-1].assert_silent()
    finally:
        bench.server.close()
        for peer in bench.peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("turn_away", ["cancels", "leaves", "asks for something else"])
def test_a_value_that_the_woken_one_leaves_wakes_the_next(bench: Bench, turn_away: str) -> None:
    """When the client woken for a queue's value doesn't take it, the next one that waits is woken."""
    first, second, pushing = bench.peer(), bench.peer(), bench.peer()
    for peer in (first, second):
        peer.ask(wire.WAIT, 1, b"/q")
        peer.assert_silent()
    pushing.ask(wire.QUEUE_PUSH, b"/q", b"v")
    assert first.take(1) == wire.WAIT_OVER
    second.assert_silent()
    if turn_away == "cancels":
        first.ask(wire.CANCEL_WAIT)
    elif turn_away == "leaves":
        first.close()
    else:
        first.ask(wire.QUEUE_POP, b"/another")
    assert second.take(1) == wire.WAIT_OVER
    second.ask(wire.QUEUE_POP, b"/q")
    assert (second.take_number(), second.take_string()) == (1, b"v")


def test_one_value_wakes_one_client(bench: Bench) -> None:
    """Of two clients that wait for a queue, one is woken by one value and takes it."""
    first, second, pushing = bench.peer(), bench.peer(), bench.peer()
    for peer in (first, second):
        peer.ask(wire.WAIT, 1, b"/q")
        peer.assert_silent()
    pushing.ask(wire.QUEUE_PUSH, b"/q", b"v")
    assert first.take(1) == wire.WAIT_OVER
    first.ask(wire.QUEUE_POP, b"/q")
    assert (first.take_number(), first.take_string()) == (1, b"v")
    second.assert_silent()


def test_a_barrier_is_called_off_like_a_wait(bench: Bench) -> None:
    """Who gives up at a barrier stays counted, as in torch, and the last one opens it for the rest."""
    first, second, third = bench.peer(), bench.peer(), bench.peer()
    for peer in (first, second):
        peer.ask(wire.BARRIER, b"/b", 3)
        peer.assert_silent()
    first.ask(wire.CANCEL_WAIT)
    assert first.take(1) == wire.WAIT_CANCELLED
    third.ask(wire.BARRIER, b"/b", 3)
    assert (second.take(1), third.take(1)) == (wire.WAIT_OVER, wire.WAIT_OVER)
    first.assert_silent()


# --- life ----------------------------------------------------------------------------------------------------------
def test_a_reset_leaves_the_port_and_nothing_else(bench: Bench) -> None:
    """After reset all keys and clients are gone, those not yet accepted too, and the same port serves anew."""
    accepted = bench.peer()
    accepted.ask(wire.SET, b"/k", b"v")
    accepted.ask(wire.WAIT, 1, b"/no")
    accepted.assert_silent()
    waiting = bench.peer(greets=False)
    bench.server.reset()
    accepted.wait_closed()
    waiting.wait_closed()
    assert (bench.data.num_keys(), bench.data._waits.by_key) == (0, {})
    bench.assert_healthy()


def test_close_closes_all(bench: Bench) -> None:
    """After close, which may come twice, no client, no port and no registration with the loop is left."""
    peer = bench.peer()
    registered = len(bench.loop._readers)
    bench.server.close()
    bench.server.close()
    peer.wait_closed()
    assert len(bench.loop._readers) == registered - 3  # the port, the server's end of the peer, the peer's own
    with pytest.raises(ConnectionRefusedError):
        bench.peer()


def test_without_descriptors_clients_wait(bench: Bench) -> None:
    """When descriptors run out the server neither spins nor fails, and serves who waits once there is one again."""
    first = bench.peer()
    late = bench.peer(greets=False)
    fillers = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.socket.fileno() + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        late.send(wire.encode_opening(NONCE))
        bench.turn_until(lambda: bench.server._pause is not None)
        assert bench.listener.fileno() not in bench.loop._readers
        first.close()
        assert late.take(4) == wire.U32.pack(NONCE)
        assert bench.server._pause is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def test_clients_leave_descriptors_to_the_rest_of_the_process(bench: Bench) -> None:
    """Clients that come when few descriptors are left are closed, with one line; afterwards others are served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    fillers: list[int] = []
    try:
        while not fillers or fillers[-1] < 1024 - 50:
            fillers.append(os.dup(0))
        for _ in range(2):
            late = bench.peer(greets=False)
            assert late.wait_closed() == b""
        (line,) = bench.refusals
        assert "too few descriptors" in line
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    bench.assert_healthy()


def test_no_descriptor_is_inherited(bench: Bench) -> None:
    """The port and every client's socket are close-on-exec: workers get none of them."""
    bench.peer()
    connection = next(iter(bench.server._connections))
    assert not os.get_inheritable(bench.listener.fileno())
    assert not os.get_inheritable(connection._fd)


def test_a_broken_pipe_kills_nobody(bench: Bench) -> None:
    """Where the program that we run in has restored SIGPIPE's default, writing to a client that left is harmless."""
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        bench.data.set(b"/big", b"x" * (8 * MIB))
        peer = bench.peer()
        peer.stop_reading()
        peer.send(wire.encode(wire.GET, b"/big") * 3)
        peer.close()
        bench.turn_until(lambda: not bench.server._connections)
    finally:
        signal.signal(signal.SIGPIPE, previous)


def test_the_limit_of_descriptors_is_raised() -> None:
    """The soft limit becomes the hard one, and what it was is returned, so that workers can get it back."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128));"
        "from elastic_run.store.server import raise_descriptor_limit;"
        "print(raise_descriptor_limit(), raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "128", "128", "128"]


def test_the_server_is_cheap_to_import() -> None:
    """Importing what an agent needs of the store imports none of the slow modules of the standard library."""
    slow = "asyncio dataclasses inspect json logging random resource socket subprocess tempfile threading torch typing"
    program = (
        "import sys; import elastic_run.loop; before = set(sys.modules); import elastic_run.store.worker_store;"
        f"print(sorted((set(sys.modules) - before) & set({slow.split()!r})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
