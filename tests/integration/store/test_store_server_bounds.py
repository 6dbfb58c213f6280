"""What the store's server takes from its clients at most, and what a defect in it costs."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.tcpstore import wire

if TYPE_CHECKING:
    from tests.support.store_bench import Bench

MIB = 1 << 20


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
    """Of all that send large messages and never finish them, the largest is closed if all take too much."""
    begun = bytes((wire.MULTI_SET,)) + wire.U64.pack(100)
    pair = wire.U64.pack(2) + b"/k" + wire.U64.pack(8 * MIB) + bytes(8 * MIB)
    small, large = bench.peer(), bench.peer()
    large.send(begun + 3 * pair)
    bench.turn_until(lambda: bench.server._holdings.total > 24 * MIB)
    small.send(begun + 2 * pair)  # makes it too much, and is not the client that takes it
    assert large.wait_closed() == b""
    assert "unfinished messages" in bench.refusals[0]
    small.send(wire.U64.pack(2) + b"/k")
    assert not small.is_closed
    small.close()
    bench.turn_until(lambda: not bench.server._connections)
    assert bench.server._holdings.total == 0


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
        patch.setattr("elastic_run.store.tcpstore.connection.Connection.flush", fail)
        setting.send(wire.encode(wire.SET, b"/k", b"v"))
        waiting.wait_closed()
    setting.close()
    bench.assert_healthy()
    (line,) = bench.refusals
    assert "MemoryError" in line
