"""The server of health checks against an agent that hangs, and against clients that don't ask."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent import http_listener
from elastic_run.agent.health_port import HealthPort
from elastic_run.agent.http_listener import HttpListener
from elastic_run.loop import Loop
from tests.integration.test_health_port import ask

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthPort]:
    """A server whose loop never turns, and that has little wait_limit."""
    monkeypatch.setattr(http_listener, "_WAIT_LIMIT", 0.2)
    serving = HealthPort(0)
    with Loop() as loop:
        serving.serve(loop, lambda: "running")
        yield serving
        serving.close()


def test_an_agent_whose_loop_hangs_is_not_alive(server: HealthPort) -> None:
    """Nor ready."""
    assert ask(server.port, "/healthz") == (503, "the agent does not answer")
    assert ask(server.port, "/readyz") == (503, "the agent does not answer")


def test_clients_that_do_not_ask_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that has been silent for longest is closed for a new one, whatever its time limit."""
    monkeypatch.setattr(http_listener, "_WAIT_LIMIT", 60.0)
    listener = HttpListener(0, "test")
    listener.serve(lambda _: (200, "text/plain", b"yes"))
    with ExitStack() as held:
        held.callback(listener.close)
        silent = [held.enter_context(connect(listener)) for _ in range(2 * http_listener._MOST)]
        for client in silent:
            client.sendall(b"GET /healthz HTTP/1.0\r\n")  # and no end of the request
        assert ask(listener.port, "/healthz") == (200, "yes")
        for client in silent[: http_listener._MOST + 1]:
            assert not read_once(client)


def test_clients_that_wait_for_an_answer_keep_their_connection() -> None:
    """Only clients that have not asked make room; where all have asked, the new one is closed."""
    is_asked, may_answer = threading.Semaphore(0), threading.Event()

    def reply_to(_: str) -> tuple[int, str, bytes]:
        is_asked.release()
        may_answer.wait(60)
        return 200, "text/plain", b""

    listener = HttpListener(0, "test")
    listener.serve(reply_to)
    with ExitStack() as held:
        held.callback(listener.close)
        clients = [held.enter_context(connect(listener)) for _ in range(http_listener._MOST)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert is_asked.acquire(timeout=60)
        assert not read_once(held.enter_context(connect(listener)))
        may_answer.set()
        assert all(map(read_once, clients))


def test_a_thread_that_cannot_be_started_costs_one_client(monkeypatch: pytest.MonkeyPatch, server: HealthPort) -> None:
    """However often it happens, the next client is answered."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * http_listener._MOST):
            with connect(server) as client:
                assert not read_once(client)
    assert ask(server.port, "/healthz")[0] == 503


def test_garbage_is_answered_or_closed(server: HealthPort) -> None:
    """And the next client is answered; a silent one is closed after a time."""
    with connect(server) as silent:
        assert not read_once(silent)
    for garbage in (b"\0" * 100_000, b"GET\r\n\r\n", b"GET /healthz HTTP/9.9\r\n\r\n", b"\r\n"):
        with connect(server) as client:
            client.sendall(garbage)
    assert ask(server.port, "/healthz")[0] == 503


def refuse(_: threading.Thread) -> None:
    """Fail as `Thread.start` does where a limit of processes is reached."""
    message = "can't start new thread"
    raise RuntimeError(message)


def connect(server: HealthPort | HttpListener) -> socket.socket:
    """Open a connection to a server."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_once(client: socket.socket) -> bytes:
    """Return a first byte, or nothing where the server has closed the connection."""
    try:
        return client.recv(1)
    except ConnectionResetError:
        return b""
