"""The store's server against raw sockets: whatever comes over the port, however slowly, and clients that wait."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.store import wire
from elastic_run.store.wire import COUNT_LIMIT
from tests.support.store import NONCE

if TYPE_CHECKING:
    from tests.support.store import Bench


MIB = 1 << 20


def noise(seed: int, size: int) -> bytes:
    """Return bytes that look random and are the same each time."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - a test's noise, no secret


# --- the opening ---------------------------------------------------------------------------------------------------
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
    assert (bench.data.list_keys(), bench.refusals, len(bench.server._connections)) == ([], [], 1)


def test_a_client_that_turns_to_garbage_is_closed(bench: Bench) -> None:
    """Random bytes behind a proper opening end that connection or wait for more; the server goes on."""
    for seed in range(50):
        peer = bench.peer()
        peer.send(noise(seed, 300))
        peer.close()
    bench.assert_healthy()


def test_what_came_before_an_error_is_answered(bench: Bench) -> None:
    """Replies to proper messages reach the client also when the next message closes the connection."""
    peer = bench.peer()
    peer.send(wire.encode(wire.ADD, b"/n", 5) + wire.encode(wire.SET, b"/t", b"x") + wire.encode(wire.ADD, b"/t", 1))
    assert peer.wait_closed() == wire.I64.pack(5)
    assert bench.refusals == []


def test_an_unknown_operation_is_told_once(bench: Bench) -> None:
    """A client that asks for what we don't know is closed, and the owner hears of it once, with the number."""
    for operation in (42, 42, 99):
        peer = bench.peer()
        peer.send(bytes((operation,)))
        peer.wait_closed()
    assert [line.partition(": ")[2] for line in bench.refusals] == ["operation 42 is unknown to this store"]
    bench.server.reset()
    peer = bench.peer()
    peer.send(bytes((99,)))
    peer.wait_closed()
    assert [line.partition(": ")[2] for line in bench.refusals[1:]] == ["operation 99 is unknown to this store"]


# --- slow and halting clients --------------------------------------------------------------------------------------
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
    assert bench.loop._writers == {}, "a loop that waits to write what is written already takes a whole processor"


def test_many_keys_in_one_message(bench: Bench) -> None:
    """A list of as many keys as the protocol allows is set, got and listed."""
    keys = [b"/%d" % number for number in range(COUNT_LIMIT)]
    peer = bench.peer()
    peer.ask(wire.MULTI_SET, len(keys), *(part for key in keys for part in (key, key)))
    peer.ask(wire.MULTI_GET, len(keys), *keys)
    expected = b"".join(wire.U64.pack(len(key)) + key for key in keys)
    assert peer.take(len(expected)) == expected
    peer.ask(wire.LIST_KEYS)
    assert peer.take_number() == len(keys)
    assert peer.take(len(expected)) == expected


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
    assert (bench.data.num_keys(), bench.data.waiters) == (0, {})
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
        bench.turn_until(lambda: bench.server._acceptor._pause is not None)
        assert bench.listener.fileno() not in bench.loop._readers
        assert ["ulimit -n" in line for line in bench.refusals] == [True]
        first.close()
        assert late.take(4) == wire.U32.pack(NONCE)
        assert bench.server._acceptor._pause is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def test_clients_leave_descriptors_to_the_rest_of_the_process(bench: Bench) -> None:
    """Clients that come when few descriptors are left are closed, and the owner hears it once."""
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
        assert "leave too few of the 1024 file descriptors of this process: raise the limit (ulimit -n)" in line
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


def test_the_limit_of_descriptors_is_raised() -> None:
    """The soft limit becomes the hard one, and what it was is returned, so that workers can get it back."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128));"
        "from elastic_run.store.worker_store import raise_descriptor_limit;"
        "print(raise_descriptor_limit(), raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "128", "128", "128"]


# --- clients that wait for keys and values, leave, and are woken ------------------------------------------------------
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
