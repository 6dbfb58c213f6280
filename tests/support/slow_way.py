"""A way to a server on which every byte takes its time, and arrives: a network with a long round trip."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from types import TracebackType

_LOOPBACK = "127.0.0.1"


class SlowWay:
    """Passes on what comes to its port, and what the server answers.

    Args:
        server: The server's port, on loopback.
        seconds: For which each byte is on its way, in one direction.

    Attributes:
        port: Where clients connect to.
    """

    def __init__(self, server: int, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._end, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ways: dict[socket.socket, socket.socket] = {}
        self._travelling: deque[tuple[float, socket.socket, bytes]] = deque()
        self._thread = threading.Thread(target=self._run)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> SlowWay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        self._thread.join(DEADLINE)
        for open_socket in (*self._ways, self._listener, self._woken):
            open_socket.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            left = self._travelling[0][0] - time.monotonic() if self._travelling else None
            ready = [key.fileobj for key, _ in self._selector.select(left)]
            if self._woken in ready:
                return
            for open_socket in ready:
                if open_socket is self._listener:
                    self._accept()
                elif isinstance(open_socket, socket.socket):
                    self._take(open_socket)
            self._arrive()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection((_LOOPBACK, self._server))
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _take(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(source)
        self._travelling.append((time.monotonic() + self._seconds, self._ways[source], data))

    def _arrive(self) -> None:
        while self._travelling and self._travelling[0][0] <= time.monotonic():
            _, target, data = self._travelling.popleft()
            try:
                if data:
                    target.sendall(data)
                else:
                    target.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # that end is gone
