"""Two threads share a connection to a TCPStore: whatever crosses or breaks, each has its own answers, or an error."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import SILENT, StoreConnectionError, StoreError, StoreTimeoutError
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.agent_client import AgentClient
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PREFIX = "/elastic-run/job/"
_CANCEL = wire.encode(wire.CANCEL_WAIT)
_WAIT = wire.encode(wire.WAIT_LOOK, 2, b"/elastic-run/job/slot", b"/elastic-run/job/start")
_PLAIN_WAIT = wire.encode(wire.WAIT, 1, b"/elastic-run/job/slot")
_ADD = wire.encode(wire.ADD, b"/elastic-run/job/count", 1)
_SUM = wire.I64.pack(7)
_MISSING = wire.U64.pack(wire.MISSING)
_FOUND = wire.WAIT_OVER + wire.U64.pack(8) + b"decision" + _MISSING
_SILENCE = 0.2


class Server:
    """The other end of one client's connection, which answers what the test says.

    Args:
        answer: Returns the answer to the client's nonce: ours, or torch's.
        timeout: The client's, for each answer.
    """

    def __init__(self, answer: Callable[[bytes], bytes], timeout: float = DEADLINE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            opening = threading.Thread(target=self._open, args=(listener.getsockname()[1], timeout))
            opening.start()
            self._peer, _ = listener.accept()
        self._peer.settimeout(DEADLINE)
        self.expect(wire.encode_opening(wire.AGENT_NONCE))
        self.send(answer(wire.U32.pack(wire.AGENT_NONCE)))
        opening.join(DEADLINE)
        self.errors: list[StoreError] = []
        self._threads: list[threading.Thread] = []

    def _open(self, port: int, timeout: float) -> None:
        self.client = AgentClient("127.0.0.1", port, timeout, _PREFIX)

    def expect(self, data: bytes) -> None:
        """Take these bytes of the client."""
        taken = b""
        while len(taken) < len(data):
            part = self._peer.recv(len(data) - len(taken))
            assert part, f"closed after {taken!r}"
            taken += part
        assert taken == data

    def expect_end(self) -> None:
        """See that the client says no more, and has closed the connection."""
        assert self._peer.recv(1) == b""

    def send(self, data: bytes) -> None:
        """Send an answer."""
        self._peer.sendall(data)

    def hang_up(self) -> None:
        """Close this end."""
        self._peer.close()

    def begin(self, ask: Callable[[], object]) -> list[object]:
        """Ask in another thread; returns where the answer comes, or the error beside it in `errors`."""
        got: list[object] = []

        def run() -> None:
            try:
                got.append(ask())
            except StoreError as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return got

    def wait(self) -> list[object]:
        """Let a thread wait for the slot."""
        return self.begin(lambda: self.client.wait_look(["slot", "start"], DEADLINE))

    def add(self) -> list[object]:
        """Let a thread ask something else."""

        def ask() -> int:
            with self.client.turn():
                return self.client.add("count", 1)

        return self.begin(ask)

    def join(self) -> None:
        """Wait until all threads have their answers."""
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()

    def close(self) -> None:
        """Close both ends."""
        self.client.close()
        self._peer.close()
        self.join()


@pytest.fixture
def server() -> Iterator[Server]:
    """One of ours."""
    made = Server(lambda _: wire.U32.pack(wire.EXTENDED))
    yield made
    made.close()


@pytest.fixture
def torchs() -> Iterator[Server]:
    """One of torch's."""
    made = Server(lambda nonce: nonce)
    yield made
    made.close()


# --- all in order ----------------------------------------------------------------------------------------------------
def test_an_operation_calls_the_wait_off_and_begins_it_again(server: Server) -> None:
    """All of it goes out in one piece, so the store has no more to read than without the wait."""
    slot = server.wait()
    server.expect(_WAIT)
    total = server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.send(wire.WAIT_CANCELLED + _SUM)
    wait_until(lambda: total)
    server.send(_FOUND)
    server.join()
    assert (slot, total) == ([[b"decision", None]], [7])


def test_each_operation_of_one_turn_has_its_answer(server: Server) -> None:
    """The wait is called off for each of them."""
    slot = server.wait()
    server.expect(_WAIT)

    def ask() -> list[int]:
        with server.client.turn():
            return [server.client.add("count", 1) for _ in range(2)]

    total = server.begin(ask)
    for _ in range(2):
        server.expect(_CANCEL + _ADD + _WAIT)
        server.send(wire.WAIT_CANCELLED + _SUM)
    wait_until(lambda: total)
    server.send(_FOUND)
    server.join()
    assert (slot, total) == ([[b"decision", None]], [[7, 7]])


def test_an_operation_without_an_answer_takes_that_of_the_cancellation(server: Server) -> None:
    """Else the wait would take it for the beginning of its end; an operation that follows takes both."""
    slot = server.wait()
    server.expect(_WAIT)

    def put() -> bool:
        with server.client.turn():
            server.client.set("key", "value")
        return True

    def put_and_add() -> int:
        with server.client.turn():
            server.client.set("key", "value")
            return server.client.add("count", 1)

    has_put = server.begin(put)
    one = _CANCEL + wire.encode(wire.SET, b"/elastic-run/job/key", b"value") + _WAIT
    server.expect(one)
    server.send(wire.WAIT_CANCELLED)
    wait_until(lambda: has_put)
    total = server.begin(put_and_add)
    server.expect(one + _CANCEL + _ADD + _WAIT)
    server.send(wire.WAIT_CANCELLED * 2 + _SUM)
    wait_until(lambda: total)
    server.send(_FOUND)
    server.join()
    assert (slot, total) == ([[b"decision", None]], [7])


def test_an_operation_that_is_refused_here_leaves_the_wait_as_it_is(server: Server) -> None:
    """A key that is too long is not sent, so nothing was called off."""
    slot = server.wait()
    server.expect(_WAIT)
    with pytest.raises(ValueError, match="over the limit"), server.client.turn():
        server.client.add("k" * 100_000, 1)
    server.send(_FOUND)
    server.join()
    assert slot == [[b"decision", None]]


def test_a_turn_that_ends_with_an_error_of_its_own_leaves_the_wait_in_order(server: Server) -> None:
    """The answer to the cancellation was taken."""
    slot = server.wait()
    server.expect(_WAIT)

    def ask() -> None:
        with server.client.turn():
            server.client.set("key", "value")
            raise StoreError

    server.begin(ask)
    server.expect(_CANCEL + wire.encode(wire.SET, b"/elastic-run/job/key", b"value") + _WAIT)
    server.send(wire.WAIT_CANCELLED)
    wait_until(lambda: server.errors)
    server.send(_FOUND)
    server.join()
    assert slot == [[b"decision", None]]
    assert len(server.errors) == 1


# --- the end of the wait crosses the cancellation --------------------------------------------------------------------
@pytest.mark.parametrize("pieces", [1, 2, 3], ids=["one piece", "two pieces", "each byte"])
def test_a_wait_whose_end_crosses_its_cancellation_has_the_end_of_the_second_one(server: Server, pieces: int) -> None:
    """The end that comes first is dropped; the second one is left to the thread that waits, and no more is asked."""
    slot = server.wait()
    server.expect(_WAIT)
    total = server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    before = _FOUND + wire.WAIT_CANCELLED + _SUM
    if pieces == 1:
        server.send(before + _FOUND)
    elif pieces == 2:
        server.send(before + _FOUND[:5])
        wait_until(lambda: total)
        server.send(_FOUND[5:])
    else:
        for byte in before + _FOUND:
            server.send(bytes((byte,)))
    server.join()
    assert (slot, total) == ([[b"decision", None]], [7])
    server.client.close()
    server.expect_end()


def test_the_same_with_torchs_server(torchs: Server) -> None:
    """It sends no values with the end of a wait: they are read by another operation."""
    slot = torchs.wait()
    torchs.expect(_PLAIN_WAIT)
    total = torchs.add()
    torchs.expect(_CANCEL + _ADD + _PLAIN_WAIT)
    torchs.send(wire.WAIT_OVER + wire.WAIT_CANCELLED + _SUM + wire.WAIT_OVER)
    looks = [
        wire.encode(wire.COMPARE_SET, f"{_PREFIX}{key}".encode(), b"\0nothing\0", b"\0nothing\0")
        for key in ("slot", "start")
    ]
    torchs.expect(b"".join(looks))
    torchs.send(wire.U64.pack(8) + b"decision" + wire.U64.pack(9) + b"\0nothing\0")
    torchs.join()
    assert (slot, total) == ([[b"decision", None]], [7])


def test_an_end_that_comes_with_its_timeout_counts(server: Server) -> None:
    """The wait is called off too late, and has its values."""
    slot = server.begin(lambda: server.client.wait_look(["slot", "start"], _SILENCE))
    server.expect(_WAIT + _CANCEL)
    server.send(_FOUND + wire.WAIT_CANCELLED)
    server.join()
    assert slot == [[b"decision", None]]


def test_a_large_answer_to_an_operation_leaves_room_for_the_awaited_values(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of an answer counts for each."""
    monkeypatch.setattr("elastic_run.store.tcpstore.client.MESSAGE_LIMIT", 64)
    monkeypatch.setattr("elastic_run.store.tcpstore.agent_client.MESSAGE_LIMIT", 64)
    slot = server.wait()
    server.expect(_WAIT)

    def ask() -> list[bytes | None]:
        with server.client.turn():
            return server.client.look(["key"])

    value = server.begin(ask)
    server.expect(_CANCEL + wire.encode(wire.LOOK, 1, b"/elastic-run/job/key") + _WAIT)
    server.send(wire.WAIT_CANCELLED + wire.U64.pack(50) + bytes(50))
    wait_until(lambda: value)
    server.send(_FOUND)
    server.join()
    assert (slot, value) == ([[b"decision", None]], [[bytes(50)]])


# --- the connection breaks -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "answer",
    [b"", wire.WAIT_OVER, _FOUND, wire.WAIT_CANCELLED, wire.WAIT_CANCELLED + _SUM[:4]],
    ids=["nothing", "half an end", "an end", "the cancellation", "half the answer"],
)
def test_a_connection_that_breaks_before_the_answer_fails_in_both_threads(server: Server, answer: bytes) -> None:
    """Whatever had come by then."""
    server.wait()
    server.expect(_WAIT)
    server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.send(answer)
    server.hang_up()
    server.join()
    assert len(server.errors) == 2


def test_a_connection_that_breaks_behind_the_answer_fails_where_it_is_waited(server: Server) -> None:
    """The operation is done, and the other thread learns at once that the store is gone."""
    slot = server.wait()
    server.expect(_WAIT)
    total = server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.send(wire.WAIT_CANCELLED + _SUM)
    wait_until(lambda: total)
    server.hang_up()
    server.join()
    assert (slot, total, len(server.errors)) == ([], [7], 1)


def test_an_operation_whose_answer_has_come_is_done_whatever_breaks_behind_it(server: Server) -> None:
    """A heartbeat that was written counts as written."""
    slot = server.wait()
    server.expect(_WAIT)
    total = server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.send(_FOUND + wire.WAIT_CANCELLED + _SUM + _FOUND[:5])
    wait_until(lambda: total)
    server.hang_up()
    server.join()
    assert (slot, total, len(server.errors)) == ([], [7], 1)


def test_a_server_that_does_not_answer_an_operation_fails_in_both_threads() -> None:
    """Its time is over for the operation; the thread that waits would wait in vain. Both learn that it was silent."""
    server = Server(lambda _: wire.U32.pack(wire.EXTENDED), timeout=_SILENCE)
    server.wait()
    server.expect(_WAIT)
    server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.expect_end()
    server.join()
    assert {type(error) for error in server.errors} == {StoreTimeoutError, StoreConnectionError}
    assert [error.reason for error in server.errors if isinstance(error, StoreConnectionError)] == [SILENT]
    server.close()


@pytest.mark.parametrize("answer", [b"", wire.WAIT_OVER, wire.WAIT_CANCELLED], ids=["nothing", "an end", "cancelled"])
def test_a_connection_that_is_closed_during_a_cancellation_wakes_both_threads(server: Server, answer: bytes) -> None:
    """The agent closes its session from a third thread."""
    server.wait()
    server.expect(_WAIT)
    server.add()
    server.expect(_CANCEL + _ADD + _WAIT)
    server.send(answer)
    server.client.close()
    server.join()
    assert len(server.errors) == 2
    server.expect_end()
