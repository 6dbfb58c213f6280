"""What a stranger can take from the store's server, and what we take from a server of somebody else."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.link import MESSAGE, encode_frame
from elastic_run.rendezvous.coordination.opening import Hello, ask
from elastic_run.store import client, wire
from elastic_run.store.client import StoreClient
from elastic_run.store.errors import FOREIGN, StoreConnectionError
from tests.support import hostile
from tests.support.launch import ELASTIC_RUN
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker
    from tests.support.store import Bench


# --- what the server takes from its clients at most, and what a defect in it costs ------------------------------------
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


# --- a job goes on ----------------------------------------------------------------------------------------------------
#: The attack would take 24 GB. With a limit on addresses it fails at once, and harms no other program.
LIMITED = ("bash", "-c", 'ulimit -v 3000000; exec "$@"', "limited", *ELASTIC_RUN)
WAITS = "say('store', os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\nopen(os.environ['GO']).read()"


def make_gate(path: Path) -> Path:
    """Make a pipe: a worker that reads it waits until the test opens and closes the other end."""
    os.mkfifo(path)
    return path


def test_a_job_of_one_node_survives(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A stranger at the workers' loopback store can neither end the launcher nor make its memory grow without bound."""
    go = make_gate(tmp_path / "go")
    job = launch("--nproc-per-node=1", worker(WAITS), program=LIMITED, env={"GO": str(go)})
    port = int(job.wait_line(r"store (\S+) (\d+)")[2])
    hostile.multiply("127.0.0.1", port)
    hostile.fill("127.0.0.1", port)
    go.write_text("")
    assert job.wait_exit() == 0, job.stderr
    for bound in ("a reply of", "the store holds"):
        (line,) = [line for line in job.stderr.splitlines() if bound in line]
        assert "127.0.0.1:" in line


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_hostile_messages_leave_the_server_within_its_bounds(seed: int) -> None:
    """After 10,000 hostile messages the server still serves other clients, within its bounds of memory."""
    outcome = hostile.run(seed, 10_000, deadline=4 * DEADLINE)
    # The keys, the waits, and what connections hold, with what an allocator keeps.
    assert outcome.growth < 6 * hostile.MEASURE


# --- servers that are none of ours and answer without end -------------------------------------------------------------
_PIECE = b"x" * 65536


class Flood:
    """A server that answers a client's opening, then sends bytes for as long as the client takes them.

    Args:
        answer: What it sends first.
        repeats: Whether it repeats the opening first, as a TCPStore does.
    """

    def __init__(self, answer: bytes, *, repeats: bool = True) -> None:
        self._answer, self._repeats = answer, repeats
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            opening = connection.recv(64)
            connection.sendall((opening[-4:] if self._repeats else b"") + self._answer)
            with suppress(OSError):  # until the client hangs up
                while True:
                    self.sent += connection.send(_PIECE)

    def close(self) -> None:
        """Wait for the end of the one connection."""
        self._listener.close()
        self._thread.join(DEADLINE)


@pytest.fixture
def flood() -> Iterator[Callable[..., Flood]]:
    """Make servers, and see that they end."""
    made = []

    def make(answer: bytes, *, repeats: bool = True) -> Flood:
        made.append(Flood(answer, repeats=repeats))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (b"\0" + wire.U64.pack((1 << 64) - 1), lambda client: client.get("k")),
        (b"\0" + 3 * (wire.U64.pack(100_000) + 100_000 * b"x"), lambda client: client.multi_get(["a", "b", "c"])),
    ],
    ids=["endless string", "many strings"],
)
def test_an_answer_of_a_store_is_bounded(
    flood: Callable[..., Flood],
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    ask: Callable[[StoreClient], object],
) -> None:
    """A store that answers with more than the bound is hung up on, and named."""
    monkeypatch.setattr(client, "MESSAGE_LIMIT", 250_000)
    server = flood(answer)
    with (
        StoreClient("127.0.0.1", server.port, DEADLINE) as asking,
        pytest.raises(StoreConnectionError, match=rf":{server.port} answers with more than 250000 bytes"),
    ):
        ask(asking)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\xff\xff\xff\xffM",
        encode_frame(MESSAGE, {"role": "?", "standing": 1}),
        _PIECE,
    ],
    ids=["another protocol", "a frame of 4 GB", "no answer of ours", "endless bytes"],
)
def test_what_answers_like_no_agent_is_named_at_once(flood: Callable[..., Flood], answer: bytes) -> None:
    """An agent that meets another program at its endpoint takes some kilobytes of it, and says what it has met."""
    server = flood(answer, repeats=False)
    with pytest.raises(StoreConnectionError, match=f"what listens at 127.0.0.1:{server.port} is no agent") as caught:
        ask(("127.0.0.1", server.port), Hello("j", "n", "h"), DEADLINE, None, dark_after=DEADLINE)
    assert caught.value.reason == FOREIGN
    assert server.sent < 16 << 20  # most of it is in the kernel's buffers
