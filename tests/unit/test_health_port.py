"""The server of health checks against an agent that hangs, and against clients that don't ask."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent import http_listener
from elastic_run.agent.health_port import HealthPort
from elastic_run.loop import Loop
from tests.integration.test_health_port import ask

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthPort]:
    """A server whose loop never turns, and that has little patience."""
    monkeypatch.setattr(http_listener, "_PATIENCE", 0.2)
    serving = HealthPort(0)
    with Loop() as loop:
        serving.serve(loop, lambda: "running")
        yield serving
        serving.close()


def test_an_agent_whose_loop_hangs_is_not_alive(server: HealthPort) -> None:
    """Nor ready."""
    assert ask(server.port, "/healthz") == (503, "the agent does not answer")
    assert ask(server.port, "/readyz") == (503, "the agent does not answer")


def test_clients_that_do_not_ask_hold_nobody_up_for_long(server: HealthPort) -> None:
    """Connections above the limit are closed at once, silent ones after a time, garbage gets an answer or none."""
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(http_listener._MOST)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as late:
        assert not late.recv(1)
    for client in silent:
        assert not client.recv(1)
        client.close()
    for garbage in (b"\0" * 100_000, b"GET\r\n\r\n", b"GET /healthz HTTP/9.9\r\n\r\n", b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(garbage)
    assert ask(server.port, "/healthz")[0] == 503
