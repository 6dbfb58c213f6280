"""The agent's HTTP server against clients that do not ask, send garbage, or wait for an answer."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent import http_server
from elastic_run.agent.http_server import HttpRequest, HttpServer
from elastic_run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Server:
    """A server whose loop the test turns, and the requests that have come."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.asked: list[HttpRequest] = []
        self.server = HttpServer(socket.create_server(("127.0.0.1", 0)))
        self.server.serve(loop, self._answer)
        self._address = self.server.listener.getsockname()
        self._clients: list[socket.socket] = []

    def _answer(self, request: HttpRequest) -> None:
        self.asked.append(request)
        if request.path == "/broken":
            raise ZeroDivisionError(request.path + "\udcff")
        if request.path != "/wait":
            request.reply(200, b"yes")

    def connect(self, data: bytes = b"") -> socket.socket:
        """Open a connection to the server, and send something."""
        before = len(self.server.clients)
        client = socket.create_connection(self._address, timeout=10)
        self._clients.append(client)
        client.sendall(data)
        client.settimeout(0)
        self.turn_until(lambda: len(self.server.clients) != before or self.is_closed(client))
        return client

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until a condition holds; a turn at least every 10 ms."""

        def tick() -> None:
            self.loop.call_later(0.01, tick)

        tick()
        assert self.loop.run_until(condition, self.loop.now() + 20), "not in time"

    def is_closed(self, client: socket.socket) -> bool:
        """Whether the server has sent something, or has ended the connection."""
        try:
            client.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def read(self, client: socket.socket) -> bytes:
        """Turn the loop until there is an answer or the end of the connection; return what came."""
        self.turn_until(lambda: self.is_closed(client))
        try:
            return client.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        """End all."""
        self.server.close()
        for client in self._clients:
            client.close()


@pytest.fixture
def server() -> Iterator[_Server]:
    """Serve."""
    with Loop() as loop:
        made = _Server(loop)
        yield made
        made.close()


def test_clients_that_do_not_ask_hold_nobody_up(server: _Server) -> None:
    """The connection that has been silent for longest is closed for a new one, whatever its time limit."""
    silent = [server.connect(b"GET /healthz HTTP/1.0\r\n") for _ in range(http_server.MOST)]
    assert server.read(server.connect(b"GET / HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nyes")
    assert server.read(silent[0]) == b""
    assert not server.is_closed(silent[1])


def test_clients_that_wait_for_an_answer_keep_their_connection(server: _Server) -> None:
    """Only clients that have not asked make room; where all have asked, the new one is closed."""
    clients = [server.connect(b"GET /wait HTTP/1.0\r\n\r\n") for _ in range(http_server.MOST)]
    server.turn_until(lambda: len(server.asked) == http_server.MOST)
    assert server.read(server.connect()) == b""
    for request in server.asked:
        request.reply(200, b"late")
    assert all(server.read(client).endswith(b"late") for client in clients)


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"\0" * 100_000, b""),
        (b"GET\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
        (b"GET / HTTP/9.9\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
        (b"GET / HTTP/1.0\r\nContent-Length: many\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
        (b"\r\n\r\n", b"HTTP/1.0 400 Bad Request"),
    ],
)
def test_garbage_is_answered_or_closed(data: bytes, answer: bytes, server: _Server) -> None:
    """And the next client is answered."""
    assert server.read(server.connect(data)).partition(b"\r\n")[0] == answer
    assert server.read(server.connect(b"HEAD /?a=b HTTP/1.1\r\nHost: x\r\n\r\n")).endswith(b"Content-Length: 3\r\n\r\n")


def test_a_defect_in_an_answer_ends_nothing(server: _Server) -> None:
    """The client is told, such as Prometheus of a package that can't be imported; the next one is answered."""
    told = server.read(server.connect(b"GET /broken HTTP/1.0\r\n\r\n"))
    assert told.startswith(b"HTTP/1.0 500 Internal Server Error\r\n")
    assert b"internal error: ZeroDivisionError: /broken\\udcff" in told
    assert server.read(server.connect(b"GET / HTTP/1.0\r\n\r\n")).endswith(b"yes")


def test_a_silent_client_is_closed_after_a_time(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has sent a part of a request."""
    monkeypatch.setattr(http_server, "WAIT_LIMIT", 0.1)
    assert server.read(server.connect(b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\nbody")) == b""


def test_a_client_that_cannot_be_accepted_comes_later(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no descriptor for it; the loop is not woken again and again for it."""
    monkeypatch.setattr(http_server, "_PAUSE", 0.1)
    listener, tries = server.server.listener, list[int]()

    class Listener:
        """Refuses once."""

        def __getattr__(self, name: str) -> object:
            return getattr(listener, name)

        def _accept(self) -> object:
            tries.append(1)
            if len(tries) == 1:
                raise OSError
            return listener._accept()  # type: ignore[attr-defined] # as `socket.accept` calls it

    monkeypatch.setattr(server.server, "listener", Listener())
    assert server.read(server.connect(b"GET / HTTP/1.0\r\n\r\n")).endswith(b"yes")
    assert len(tries) == 2
