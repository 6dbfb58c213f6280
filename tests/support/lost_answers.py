"""A way to a server that loses answers: the request arrives and is done, and the client never learns of it."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from types import TracebackType


class LosingWay:
    """Passes on what comes to its port, and what the server answers.

    Args:
        server: The server's port, on loopback.

    Attributes:
        port: Where clients connect to.
        losses: Number of answers to lose from now on; the connection of each ends with it.
        part: Only answers to requests that contain this are lost.
    """

    def __init__(self, server: int) -> None:
        self.losses = 0
        self.part = b""
        self._server = server
        self._listener = socket.create_server((LOOPBACK, 0))
        self._end, self._ended = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> LosingWay:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listener.close()
        self._ended.close()

    def _accept(self) -> None:
        while self._listener in select.select([self._listener, self._ended], [], [])[0]:
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._pass_on, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection((LOOPBACK, self._server)) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = content = b""
            while True:
                ready = select.select([client, server, self._ended], [], [])[0]
                if self._ended in ready:
                    return
                if client in ready:
                    content = client.recv(1 << 16)
                    request += content
                    server.sendall(content)
                if server in ready:
                    content = server.recv(1 << 16)
                    if self.losses and self.part in request:
                        self.losses -= 1
                        return
                    client.sendall(content)
                    request = b""
                if not content:
                    return
