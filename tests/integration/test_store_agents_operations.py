"""The operations that our server has beside torch's: what they answer, whom they serve, and their bounds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.limits import COUNT_LIMIT
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.agent_client import AgentClient
from tests.support.job_stores import torchs_server
from tests.support.store import LOOPBACK, ServedStore
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.store import Peer
    from tests.support.store_bench import Bench

MIB = 1 << 20
A, B, BIG, STREAM = (wire.AGENT_PREFIX + b"job/" + name for name in (b"a", b"b", b"big", b"stream"))
MISSING = wire.U64.pack(wire.MISSING)
FOR_AGENTS = {
    "look": lambda key: wire.encode(wire.LOOK, 1, key),
    "wait-look": lambda key: wire.encode(wire.WAIT_LOOK, 1, key),
    "stream-append": lambda key: wire.encode(wire.STREAM_APPEND, key, b"v"),
}


def string(value: bytes) -> bytes:
    """Return a value as it is answered."""
    return wire.U64.pack(len(value)) + value


def agent(bench: Bench, **values: bytes) -> Peer:
    """Connect an agent, which sets keys of the job `job`."""
    peer = bench.peer()
    for name, value in values.items():
        peer.ask(wire.SET, wire.AGENT_PREFIX + b"job/" + name.encode(), value)
    return peer


# --- what they answer ------------------------------------------------------------------------------------------------
def test_an_agent_learns_that_the_server_is_ours(bench: Bench) -> None:
    """An agent's nonce is answered with another one, a worker's with itself, and so is an agent's once it is known."""
    peer = bench.peer(greets=False)
    peer.send(wire.encode_opening(wire.AGENT_NONCE))
    assert peer.take(4) == wire.U32.pack(wire.EXTENDED)
    worker = bench.peer(greets=False)
    worker.send(wire.encode_opening(17))
    assert worker.take(4) == wire.U32.pack(17)


def test_a_look_marks_what_is_missing(bench: Bench) -> None:
    """LOOK answers with each value in the order of the keys; an empty value is there, a missing one is marked."""
    peer = agent(bench, a=b"1", b=b"")
    peer.ask(wire.LOOK, 4, B, STREAM, A, A)
    expected = string(b"") + MISSING + string(b"1") + string(b"1")
    assert peer.take(len(expected)) == expected
    peer.assert_silent()


def test_a_wait_brings_values(bench: Bench) -> None:
    """WAIT_LOOK waits for its first key only, and answers with what lies at all keys at that moment."""
    waiting, setting = bench.peer(), agent(bench, b=b"old")
    waiting.ask(wire.WAIT_LOOK, 3, A, B, STREAM)
    waiting.assert_silent()
    setting.ask(wire.MULTI_SET, 2, B, b"new", A, b"1")
    expected = wire.WAIT_OVER + string(b"1") + string(b"new") + MISSING
    assert waiting.take(len(expected)) == expected
    waiting.ask(wire.WAIT_LOOK, 2, A, STREAM)
    assert waiting.take(18) == wire.WAIT_OVER + string(b"1") + MISSING
    waiting.assert_silent()


def test_a_wait_for_values_is_called_off(bench: Bench) -> None:
    """A cancelled WAIT_LOOK is answered with 1 and no values; where the end has crossed, its answer comes first."""
    peer, setting = bench.peer(), bench.peer()
    peer.ask(wire.WAIT_LOOK, 2, A, B)
    peer.ask(wire.CANCEL_WAIT)
    assert peer.take(1) == wire.WAIT_CANCELLED
    peer.ask(wire.WAIT_LOOK, 2, A, B)
    peer.assert_silent()
    setting.ask(wire.SET, A, b"1")
    setting.assert_silent()
    peer.ask(wire.CANCEL_WAIT)
    expected = wire.WAIT_OVER + string(b"1") + MISSING + wire.WAIT_CANCELLED
    assert peer.take(len(expected)) == expected
    peer.assert_silent()


@pytest.mark.parametrize("second", [wire.WAIT, wire.WAIT_LOOK])
def test_a_wait_within_a_wait_is_refused(bench: Bench, second: int) -> None:
    """A client that waits twice at once could not tell the answers apart, and is closed."""
    peer = bench.peer()
    peer.send(wire.encode(wire.WAIT_LOOK, 1, A) + wire.encode(second, 1, B))
    assert peer.wait_closed() == b""


def test_an_entry_and_its_number_are_one(bench: Bench) -> None:
    """STREAM_APPEND counts up and fills the slot, and wakes the client that waits for the slot."""
    reading, writing = bench.peer(), bench.peer()
    reading.ask(wire.WAIT_LOOK, 2, STREAM + b"/2", STREAM + b"/count")
    for number in (1, 2):
        writing.ask(wire.STREAM_APPEND, STREAM, b"entry %d" % number)
        assert writing.take(8) == wire.I64.pack(number)
    expected = wire.WAIT_OVER + string(b"entry 2") + string(b"2")
    assert reading.take(len(expected)) == expected


def test_a_slot_is_filled_once(bench: Bench) -> None:
    """Where the slot is filled, or lies below the floor, STREAM_APPEND answers 0 and the next one takes the next."""
    peer = bench.peer()
    peer.ask(wire.SET, STREAM + b"/1", b"there")
    peer.ask(wire.SET, STREAM + b"/floor", b"2")
    for number in (0, 0, 3):
        peer.ask(wire.STREAM_APPEND, STREAM, b"entry")
        assert peer.take(8) == wire.I64.pack(number)
    peer.ask(wire.LOOK, 3, STREAM + b"/1", STREAM + b"/2", STREAM + b"/3")
    expected = string(b"there") + MISSING + string(b"entry")
    assert peer.take(len(expected)) == expected


@pytest.mark.parametrize("name", [b"count", b"floor"])
@pytest.mark.parametrize("garbage", [b"many", b"9" * 5000])
def test_a_stream_of_garbage_ends_the_connection(bench: Bench, name: bytes, garbage: bytes) -> None:
    """A stream whose count or floor is no number closes the connection, as ADD does, and fills nothing."""
    peer = bench.peer()
    peer.ask(wire.SET, STREAM + b"/" + name, garbage)
    peer.ask(wire.STREAM_APPEND, STREAM, b"entry")
    assert peer.wait_closed() == b""
    assert STREAM + b"/1" not in bench.server._agents.data.list_keys()


# --- whom they serve -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("question", FOR_AGENTS.values(), ids=FOR_AGENTS.keys())
def test_workers_dont_have_them(bench: Bench, question: Callable[[bytes], bytes]) -> None:
    """On keys of workers each of them closes the connection, unanswered and without effect."""
    agent(bench, a=b"secret")
    for message in (question(b"/a"), wire.encode(wire.SET, b"/worker", b"") + question(A)):
        peer = bench.peer()
        peer.send(message)
        assert peer.wait_closed() == b""
    assert bench.data.list_keys() == [b"/worker"]
    assert not bench.unknown


# --- bounds ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operation", [wire.LOOK, wire.WAIT_LOOK])
def test_an_answer_is_bounded(small: int, bench: Bench, operation: int) -> None:
    """An answer over the server's measure closes the connection at once, and one line says so."""
    agent(bench, big=bytes(8 * MIB)).assert_silent()
    peer = bench.peer()
    peer.ask(operation, 5, *[BIG] * 5)
    assert peer.wait_closed() in (b"", wire.WAIT_OVER)
    assert bench.refusals == [f"{_name(peer)}: a reply of {5 * 8 * MIB} bytes, over the limit of {small}"]
    bench.assert_healthy()


@pytest.mark.usefixtures("small")
def test_an_answer_at_the_end_of_a_wait_is_bounded(bench: Bench) -> None:
    """A wait whose answer has grown too large ends that client's connection, and not the one that ends the wait."""
    waiting, setting = bench.peer(), agent(bench, big=bytes(8 * MIB))
    waiting.ask(wire.WAIT_LOOK, 6, A, *[BIG] * 5)
    waiting.assert_silent()
    setting.ask(wire.SET, A, b"1")
    assert waiting.wait_closed() == b""
    assert len(bench.refusals) == 1
    assert _name(waiting) in bench.refusals[0]
    setting.assert_silent()


def test_large_values_are_shared(bench: Bench) -> None:
    """However many clients wait for one large value, it is in memory once."""
    setting, waiting = bench.peer(), [bench.peer() for _ in range(20)]
    for peer in waiting:
        peer.stop_reading()
        peer.ask(wire.WAIT_LOOK, 3, A, BIG, BIG)
        peer.ask(wire.PING)
    setting.ask(wire.SET, BIG, bytes(8 * MIB))
    setting.ask(wire.SET, A, b"1")
    bench.wait_backlogs(20)
    parts = [part for connection in bench.server._connections for part in connection._queue if len(part) > MIB]
    assert len(parts) >= 20
    assert len({id(part.obj if isinstance(part, memoryview) else part) for part in parts}) == 1
    assert bench.server._holdings.total < MIB


@pytest.mark.usefixtures("small")
def test_unread_answers_at_the_end_of_waits_are_bounded(bench: Bench) -> None:
    """Copies of small values that clients don't read count: together they pass the measure, and the largest is cut."""
    setting, count = agent(bench, b=bytes(2000)), 8
    for _ in range(count):
        peer = bench.peer()
        peer.stop_reading()
        peer.ask(wire.WAIT_LOOK, 8001, A, *[B] * 8000)
    setting.assert_silent()
    bench.turn_until(lambda: sum(one.waiter is not None for one in bench.server._connections) == count)
    setting.ask(wire.SET, A, b"1")
    setting.assert_silent()
    assert "unread replies" in bench.refusals[0]
    assert bench.server._holdings.total <= bench.server._holdings.limit


@pytest.mark.usefixtures("small")
def test_keys_of_a_wait_are_bounded(bench: Bench) -> None:
    """The keys that are read at the end of a wait count as those that are waited for; who leaves gives them back."""
    keys = [A, *(A + b"%08d" % number for number in range(COUNT_LIMIT - 1))]
    message = wire.encode(wire.WAIT_LOOK, len(keys), *keys)
    for _ in range(2):
        bench.peer().send(message)
    bench.turn_until(lambda: bool(bench.refusals))
    assert "waits hold" in bench.refusals[0]
    for peer in bench.peers:
        peer.close()
    bench.turn_until(lambda: not bench.server._connections)
    waits = bench.server._agents.data._waits
    assert (waits.size, waits.by_key) == (0, {})


def test_a_full_store_counts_nothing(small: int, bench: Bench) -> None:
    """An entry for which there is no room leaves the count as it was: no gap holds the readers up."""
    data = bench.server._agents.data
    for number in (1, 2, 3):
        peer = bench.peer()
        peer.ask(wire.STREAM_APPEND, STREAM, bytes(8 * MIB))
        assert peer.take(8) == wire.I64.pack(number)
    peer = bench.peer()
    peer.ask(wire.STREAM_APPEND, STREAM, bytes(8 * MIB))
    assert peer.wait_closed() == b""
    assert "the store holds" in bench.refusals[0]
    assert data.get(STREAM + b"/count") == b"3"
    assert data.size < small


def _name(peer: Peer) -> str:
    return "{}:{}".format(*peer.socket.getsockname())


# --- the client ------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["ours", "torch"])
def client(request: pytest.FixtureRequest) -> Iterator[AgentClient]:
    """Give an agent's client of each kind of server."""
    with (
        ServedStore() if request.param == "ours" else torchs_server() as serving,
        AgentClient(LOOPBACK, serving if isinstance(serving, int) else serving.port, DEADLINE, _PREFIX) as opened,
    ):
        assert opened._is_extended == (request.param == "ours")
        yield opened


_PREFIX = wire.AGENT_PREFIX.decode() + "job/"


def test_a_client_does_the_same_on_both_servers(client: AgentClient) -> None:
    """Looking, waiting and appending have the same results, whichever operations they take."""
    assert client.look([]) == []
    assert client.look(["a", "b"]) == [None, None]
    client.write(["a", "b"], [b"1", b"2" * 5000])
    assert client.look(["b", "x", "a"]) == [b"2" * 5000, None, b"1"]
    assert client.get_all(["a", "b"]) == [b"1", b"2" * 5000]
    assert client.get_all(["a", "x"]) == [b"1", None]
    assert client.wait_look(["x", "a"], 0.01) == [None, b"1"]
    assert client.wait_look(["x", "a"], 0) == [None, b"1"]
    assert client.wait_look(["a", "x"], DEADLINE) == [b"1", None]
    assert [client.append_entry(b"stream", b"e%d" % number) for number in range(2)] == [True, True]
    assert client.look(["stream/1", "stream/2", "stream/count"]) == [b"e0", b"e1", b"2"]
    client.set("stream/3", b"void")
    assert [client.append_entry(b"stream", b"late") for _ in range(2)] == [False, True]
    client.set("stream/floor", b"6")
    assert [client.append_entry(b"stream", b"later") for _ in range(3)] == [False, False, True]
    assert client.look([f"stream/{number}" for number in range(3, 8)]) == [b"void", b"late", None, None, b"later"]


def test_a_wait_ends_with_the_value(client: AgentClient) -> None:
    """A client that waits gets the value when another client sets it."""
    with client.clone() as other:
        timer = threading.Timer(0.05, lambda: other.compare_set("a", "", b"1"))
        timer.start()
        assert client.wait_look(["a", "b"], DEADLINE) == [b"1", None]
        timer.join()


def test_a_wait_whose_end_crossed_has_its_values() -> None:
    """A client whose cancellation crosses with the end of the wait takes the values, and stays usable."""
    with ServedStore() as serving, AgentClient(LOOPBACK, serving.port, DEADLINE, _PREFIX) as client:
        fill = client._stream.fill

        def late(size: int, timeout: float) -> None:
            fill(size, DEADLINE)
            client._stream.fill = fill  # type: ignore[method-assign]
            raise TimeoutError(timeout)

        client.set("a", b"1")
        client._stream.fill = late  # type: ignore[method-assign]
        assert client.wait_look(["a", "b"], 0.01) == [b"1", None]
        assert client.look(["a"]) == [b"1"]


def test_two_kinds_of_writers_and_a_reader_agree() -> None:
    """Entries of a writer that knows torch's operations only and of one of ours come in one order, none lost."""
    with (
        ServedStore() as serving,
        C10dJobStore(LOOPBACK, serving.port, "job", timeout=DEADLINE) as ours,
        ours.clone() as standard,
    ):
        standard._client._is_extended = False
        for number in range(ENTRIES_AT_ONCE + 10):
            (ours, standard)[number % 2].append("facts", b"%d" % number)
        first, position = ours.read("facts", 0, 0)
        second, _ = standard.read("facts", position, 0)
        assert first + second == [b"%d" % number for number in range(ENTRIES_AT_ONCE + 10)]
