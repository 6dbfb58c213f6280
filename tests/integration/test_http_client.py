"""Our client of HTTP against servers that answer slowly, wrongly, or not at all."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import FOREIGN, SILENT, UNREADY, StoreConnectionError
from elastic_run.store.jobstore.http_client import Endpoint, HttpClient
from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
_TIMEOUT = 0.5


class Script:
    """A server that answers each request of each connection with the same pieces.

    Args:
        pieces: The parts of its answer, in order.
        pause: Seconds before each piece but the first.
        closes: Whether the connection ends with the answer.
    """

    def __init__(self, pieces: list[bytes], pause: float, *, closes: bool) -> None:
        self._pieces, self._pause, self._closes = pieces, pause, closes
        self._listener = socket.create_server((LOOPBACK, 0))
        self.endpoint = Endpoint(*self._listener.getsockname())
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self._listener.accept()[0])
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(self.connections[-1],)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while request := connection.recv(4096):
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(4096)
                    self.requests.append(request)
                    for number, piece in enumerate(self._pieces):
                        time.sleep(self._pause if number else 0)
                        connection.sendall(piece)
                    if self._closes:
                        return
            except OSError:
                pass

    def close(self) -> None:
        """End all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE)
        self._listener.close()
        for thread in self._threads[1:]:
            thread.join(DEADLINE)


@pytest.fixture
def client() -> Iterator[Callable[..., tuple[HttpClient, Script]]]:
    """Make a server of these pieces, and a client of it."""
    made: list[tuple[HttpClient, Script]] = []

    def make(
        *pieces: bytes, pause: float = 0.0, closes: bool = False, timeout: float = _TIMEOUT
    ) -> tuple[HttpClient, Script]:
        server = Script(list(pieces), pause, closes=closes)
        made.append((HttpClient([server.endpoint], timeout), server))
        return made[-1]

    yield make
    for http, server in made:
        http.close()
        server.close()


def ask(http: HttpClient) -> bytes:
    """Ask for a page."""
    return http.ask("GET", "/", b"", {}).body


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (_OK + b"X: ", b"x"),
        (_OK, b"X: y\r\n"),
        (_OK + b"Content-Length: 1000\r\n\r\n", b"x"),
        (_CHUNKED, b"0"),
        (_CHUNKED, b"1\r\nx\r\n"),
    ],
    ids=["header", "headers", "body", "length of a chunk", "chunks"],
)
def test_an_answer_that_drips_ends_in_time(
    client: Callable[..., tuple[HttpClient, Script]], start: bytes, piece: bytes
) -> None:
    """The timeout is for the whole answer: bytes that come now and then don't lengthen it."""
    http, _ = client(start, *[piece] * 60, pause=0.05)
    begun = time.monotonic()
    with pytest.raises(StoreConnectionError) as caught:
        ask(http)
    assert caught.value.reason == SILENT
    assert time.monotonic() - begun < stretched(4 * _TIMEOUT)


@pytest.mark.parametrize(
    "answer",
    [
        b"\0\1\2no line",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        _OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        _CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n",
        _CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
        _CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_a_server_that_speaks_otherwise_is_named(
    client: Callable[..., tuple[HttpClient, Script]], answer: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is no HTTP is said at once, on no console, and the server is not asked again."""
    http, server = client(answer, timeout=DEADLINE)
    begun = time.monotonic()
    with pytest.raises(
        StoreConnectionError, match=f"{server.endpoint}: what listens there does not speak HTTP"
    ) as caught:
        ask(http)
    assert caught.value.reason == FOREIGN
    assert time.monotonic() - begun < DEADLINE / 2
    assert len(server.requests) == 1
    assert capfd.readouterr() == ("", "")


def test_one_connection_serves_all_requests(client: Callable[..., tuple[HttpClient, Script]]) -> None:
    """The connection is kept; another one is made when the server has closed it, or says that it will."""
    http, server = client(_OK + b"Content-Length: 2\r\n\r\n{}")
    assert [ask(http) for _ in range(3)] == [b"{}"] * 3
    assert len(server.connections) == 1
    server.connections[0].shutdown(socket.SHUT_RDWR)
    assert ask(http) == b"{}"
    assert (len(server.connections), len(server.requests)) == (2, 4)
    http, server = client(_OK + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", closes=True)
    assert [ask(http) for _ in range(3)] == [b"{}"] * 3
    assert (len(server.connections), len(server.requests)) == (3, 3)


def test_nobody_else_is_asked(
    client: Callable[..., tuple[HttpClient, Script]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirection is an answer like others, and a proxy of the environment is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    _, other = client(b"")
    http, server = client(
        _OK.replace(b"200 OK", b"302 Found")
        + f"Location: http://{other.endpoint}/\r\n".encode()
        + b"Content-Length: 0\r\n\r\n"
    )
    assert http.ask("GET", "/", b"", {}).status == 302
    assert (len(server.requests), len(other.connections)) == (1, 0)


def test_a_server_that_asks_for_patience_gets_our_own(client: Callable[..., tuple[HttpClient, Script]]) -> None:
    """Where a server can't answer now the pauses are those of the client, not the server's."""
    http, server = client(_OK.replace(b"200", b"503") + b"Retry-After: 30\r\nContent-Length: 4\r\n\r\nbusy")
    begun = time.monotonic()
    with pytest.raises(StoreConnectionError) as caught:
        ask(http)
    # On a busy machine the end of the time may cut the last attempt.
    said = str(caught.value) if caught.value.reason == UNREADY else caught.value.answer
    assert said.startswith("etcd at ")
    assert said.endswith(": busy")
    assert time.monotonic() - begun < stretched(4 * _TIMEOUT)
    assert len(server.requests) > 1


@pytest.mark.parametrize(
    "pieces", [[b""], [_OK + b"X: "], [_CHUNKED], [_CHUNKED, b"8\r\n{}\n"]], ids=["nothing", "head", "body", "chunk"]
)
def test_another_thread_ends_a_wait(client: Callable[..., tuple[HttpClient, Script]], pieces: list[bytes]) -> None:
    """`close` ends a request that is under way, wherever it stands."""
    http, server = client(*pieces, timeout=10 * DEADLINE)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            ask(http)
        except StoreConnectionError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not server.requests:
        time.sleep(0.01)
    http.close()
    thread.join(DEADLINE)
    assert len(caught) == 1


def test_a_watch_is_ended_by_another_thread(client: Callable[..., tuple[HttpClient, Script]]) -> None:
    """`close` ends the wait for the next line of an answer that streams."""
    http, _ = client(_CHUNKED + b"3\r\n{}\n\r\n")
    connection, _ = http.open_answer("GET", "/", b"", {})
    assert connection.receive_lines(DEADLINE) == [b"{}"]
    threading.Timer(0.1, http.close).start()
    with pytest.raises(StoreConnectionError):
        connection.receive_lines(10 * DEADLINE)


def test_lines_of_a_watch_come_whole(client: Callable[..., tuple[HttpClient, Script]]) -> None:
    """A wait that is over before a line is complete loses nothing of it; the end of the answer is told behind it."""
    http, _ = client(_CHUNKED, b"2\r\nab\r\n", b"4\r\nc\n\nd\r\n1\r\n\n\r\n0\r\n\r\n", pause=0.2)
    connection, answer = http.open_answer("GET", "/", b"", {})
    assert (answer.status, answer.headers["transfer-encoding"]) == (200, "chunked")
    lines: list[bytes] = []
    end = time.monotonic() + DEADLINE
    while len(lines) < 2 and time.monotonic() < end:
        lines += connection.receive_lines(0.01)
    assert lines == [b"abc", b"d"]
    with pytest.raises(StoreConnectionError, match="ended its answer"):
        connection.receive_lines(DEADLINE)
