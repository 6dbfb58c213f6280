"""Servers that are no stores of ours and answer without end: our clients take a bounded part, and say so."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import StoreAccessError, StoreConnectionError, WireError
from elastic_run.store.jobstore import http_connection
from elastic_run.store.jobstore.compression import compress, decompress_all
from elastic_run.store.jobstore.file import FileJobStore
from elastic_run.store.jobstore.http_connection import HttpConnection
from elastic_run.store.limits import MESSAGE_LIMIT
from elastic_run.store.stream import Stream
from elastic_run.store.tcpstore import agent_client, client, wire
from elastic_run.store.tcpstore.agent_client import AgentClient
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PIECE = b"x" * 65536


class Flood:
    """A server that answers a client's opening, then sends bytes for as long as the client takes them.

    Args:
        answer: What it sends first.
        piece: What it sends again and again; nothing to be silent from then on.
    """

    def __init__(self, answer: bytes, piece: bytes = _PIECE) -> None:
        self._answer, self._piece = answer, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            opening = connection.recv(64)
            connection.sendall(opening[-4:] + self._answer)
            try:
                while self._piece:
                    self.sent += connection.send(self._piece)
                while connection.recv(65536):
                    pass  # until the client hangs up
            except OSError:
                pass

    def close(self) -> None:
        """Wait for the end of the one connection."""
        self._listener.close()
        self._thread.join(DEADLINE)


@pytest.fixture
def flood() -> Iterator[Callable[..., Flood]]:
    """Make servers, and see that they end."""
    made = []

    def make(*words: bytes) -> Flood:
        made.append(Flood(*words))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (wire.U64.pack((1 << 64) - 1), lambda client: client.compare_set("k", "", "v")),
        (wire.U64.pack(MESSAGE_LIMIT + 1), lambda client: client.look(["k"])),
        (b"\0" + 3 * (wire.U64.pack(100_000) + 100_000 * b"x"), lambda client: client.multi_get(["a", "b", "c"])),
        (3 * (wire.U64.pack(100_000) + 100_000 * b"x"), lambda client: client.look(["a", "b", "c"])),
        (wire.I64.pack(1 << 60), lambda client: client.list_keys()),
        (wire.I64.pack(-1), lambda client: client.list_keys()),
    ],
    ids=["endless string", "large string", "many strings", "many answers", "endless list", "negative list"],
)
def test_an_answer_of_a_store_is_bounded(
    flood: Callable[..., Flood],
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    ask: Callable[[AgentClient], object],
) -> None:
    """A store that answers with more than the bound is hung up on, and named."""
    for module in (agent_client, client):
        monkeypatch.setattr(module, "MESSAGE_LIMIT", 250_000)
    server = flood(answer)
    with (
        AgentClient("127.0.0.1", server.port, DEADLINE) as asking,
        pytest.raises(StoreConnectionError, match=rf":{server.port} answers with more than 250000 bytes"),
    ):
        ask(asking)


def open_http(server: Flood) -> HttpConnection:
    """Connect to a server that answers as to HTTP."""
    connected = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
    connected.sendall(b"GET ")
    stream = Stream(connected, "etcd")
    stream.receive(4, DEADLINE)  # the server's echo
    return HttpConnection(stream, "etcd")


@pytest.mark.parametrize(
    ("answer", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", _PIECE),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"99999999999\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"X-%d: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", _PIECE),
    ],
    ids=["length", "endless chunks", "large chunk", "endless headers", "endless header"],
)
def test_an_answer_of_an_etcd_is_bounded(
    flood: Callable[..., Flood], monkeypatch: pytest.MonkeyPatch, answer: bytes, piece: bytes
) -> None:
    """An etcd that answers without end is given up at the bound."""
    monkeypatch.setattr(http_connection, "MESSAGE_LIMIT", 1_000_000)
    connection = open_http(flood(answer, piece))
    with pytest.raises(WireError):
        _read_answer(connection)
    connection.close()


def test_a_server_that_speaks_another_protocol_is_noticed_at_once(flood: Callable[..., Flood]) -> None:
    """What it says first shows it, though it does not end its line."""
    connection = open_http(flood(b"another protocol", b""))
    with pytest.raises(WireError):
        connection.ask("GET", "/", b"", {}, 10 * DEADLINE)
    connection.close()


def _read_answer(connection: HttpConnection) -> bytes:
    connection.ask("GET", "/", b"", {}, DEADLINE)
    return connection.receive_body(DEADLINE)


def test_a_line_of_a_watch_is_bounded(flood: Callable[..., Flood], monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose line never ends is given up at the bound."""
    monkeypatch.setattr(http_connection, "MESSAGE_LIMIT", 1_000_000)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = open_http(flood(head, b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"))
    connection.ask("GET", "/", b"", {}, DEADLINE)
    with pytest.raises(StoreConnectionError, match="in one piece"):
        connection.receive_lines(DEADLINE)


def test_each_line_of_a_watch_comes_as_soon_as_it_ends(flood: Callable[..., Flood]) -> None:
    """Whatever pieces the server sends it in; the next line may be a long time off."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [b"1\n", b"2", b"2\n\n3\n4", b"4\n"]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    connection = open_http(flood(head + chunks, b""))
    connection.ask("GET", "/", b"", {}, DEADLINE)
    lines: list[bytes] = []
    while len(lines) < 4 and (more := connection.receive_lines(DEADLINE)):
        lines += more
    assert lines == [b"1", b"22", b"3", b"44"]
    connection.close()


def test_entries_together_are_unpacked_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small values that would decompress to gigabytes stay as they are once the bound is reached."""
    monkeypatch.setattr("elastic_run.store.jobstore.compression.MESSAGE_LIMIT", 100_000)
    packed = compress(bytes(40_000))
    assert [len(value) for value in decompress_all([packed] * 4)] == [40_000, 40_000, len(packed), len(packed)]


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    """A file of a job store in a directory that is larger than any message is not read, and is named."""
    store = FileJobStore(str(tmp_path), "j")
    store.create("k", b"v")
    (path,) = [path for path in tmp_path.rglob("k") if path.is_file()]
    with path.open("r+b") as file:
        file.truncate(MESSAGE_LIMIT + 1)  # sparse: it takes no space
    with pytest.raises(StoreAccessError, match=f"{path} has more than"):
        store.get(["k"])
