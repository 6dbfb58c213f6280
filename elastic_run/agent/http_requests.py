"""One request over HTTP, read and answered by the standard library's HTTP server."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["answer"]


def answer(connection: socket.socket, reply_to: Callable[[str], tuple[int, str, bytes]]) -> None:
    """Read one request from a connection and answer it.

    Args:
        connection: The client's, with a time limit.
        reply_to: Takes the path without a query; returns status, content type and body.
    """
    _Request(connection, reply_to)


class _Request(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.0"  # one request a connection
    server_version = "elastic-run"
    sys_version = ""

    def __init__(self, connection: socket.socket, reply_to: Callable[[str], tuple[int, str, bytes]]) -> None:
        self._reply_to = reply_to
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type] # it keeps its server, and asks it nothing

    def do_GET(self) -> None:
        """Answer."""
        status, content_type, body = self._reply_to(self.path.partition("?")[0])
        self.send_response(HTTPStatus(status))
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Write nothing: a request comes every few seconds."""
