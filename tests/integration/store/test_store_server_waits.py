"""Clients of the store's server that wait for keys and values, leave, and are woken."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.tcpstore import wire

if TYPE_CHECKING:
    from tests.support.store_bench import Bench

MIB = 1 << 20


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
