"""One request of a health check, read and answered by the standard library's HTTP server."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from elastic_run.core.agent.machine import RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["answer"]


def answer(connection: socket.socket, ask: Callable[[], str | None]) -> None:
    """Read one request from a connection and answer it.

    Args:
        connection: The client's, with a time limit.
        ask: Returns the agent's state, or None where it doesn't answer.
    """
    _Request(connection, ask)


class _Request(BaseHTTPRequestHandler):
    """Answers ``/healthz`` and ``/readyz``."""

    protocol_version = "HTTP/1.0"  # one request a connection
    server_version = "elastic-run"
    sys_version = ""

    def __init__(self, connection: socket.socket, ask: Callable[[], str | None]) -> None:
        self._ask = ask
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type] # it keeps its server, and asks it nothing

    def do_GET(self) -> None:
        """Answer with the agent's state."""
        path = self.path.partition("?")[0]
        if path not in {"/healthz", "/readyz"}:
            self._reply(HTTPStatus.NOT_FOUND, "there are /healthz and /readyz")
            return
        state = self._ask()
        is_well = state is not None if path == "/healthz" else state == RUNNING
        text = "the agent does not answer" if state is None else state
        self._reply(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, text)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Write nothing: a check comes every few seconds."""

    def _reply(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
