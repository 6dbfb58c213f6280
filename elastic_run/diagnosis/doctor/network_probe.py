"""Connections and datagrams from node to node.

Each node listens at one TCP and one UDP port while the nodes examine each other. A TCP connection needs both
directions, so it does not tell which of them is broken; a datagram that arrives tells that its direction works.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

from elastic_run.store.connecting import connect_once
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Listener", "measure_rate", "try_connection"]

_DATAGRAMS = 3
_CHUNK = bytes(1 << 20)
_RANK = 4


class Listener:
    """This node's ports, which answer other nodes until they are closed.

    Args:
        address: The address of this node by which others reach it.
        backlog: Number of other nodes.

    Attributes:
        tcp_port: The port that accepts connections; their bytes are read and thrown away.
        udp_port: The port at which datagrams are counted.
    """

    def __init__(self, address: str, backlog: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=max(backlog, 1))
        self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self._datagrams.bind((address, 0))
        self._server.settimeout(0)
        self._datagrams.settimeout(0)
        self.tcp_port: int = self._server.getsockname()[1]
        self.udp_port: int = self._datagrams.getsockname()[1]
        self._heard: set[int] = set()
        self._has_heard = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._datagrams, selectors.EVENT_READ, self._hear)
        self._thread = threading.Thread(target=self._serve, name="doctor's ports", daemon=True)
        self._thread.start()

    def send(self, rank: int, addresses: Iterable[tuple[str, int]]) -> None:
        """Send each other node some datagrams with this node's rank."""
        for _ in range(_DATAGRAMS):
            for address in addresses:
                try:
                    self._datagrams.sendto(rank.to_bytes(_RANK, "big"), address)
                except OSError:
                    continue  # the connection will say why

    def wait_heard(self, ranks: set[int], timeout: float) -> set[int]:
        """Wait until datagrams of these nodes have come, and return the nodes whose datagrams have come."""
        with self._has_heard:
            self._has_heard.wait_for(lambda: ranks <= self._heard, timeout)
            return set(self._heard)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _accept(self, server: socket.socket) -> None:
        try:
            taken, _ = server.accept()
        except OSError:
            return
        taken.settimeout(0)
        self._selector.register(taken, selectors.EVENT_READ, self._read)

    def _read(self, taken: socket.socket) -> None:
        try:
            if taken.recv(len(_CHUNK)):
                return
            taken.send(b"\0")  # all of it has come
        except OSError:
            pass
        self._selector.unregister(taken)
        taken.close()

    def _hear(self, datagrams: socket.socket) -> None:
        try:
            text = datagrams.recv(64)
        except OSError:
            return
        with self._has_heard:
            self._heard.add(int.from_bytes(text[:_RANK], "big"))
            self._has_heard.notify_all()


def try_connection(host: str, port: int, timeout: float) -> str:
    """Connect once; returns "" or why that is not possible, one of the words of `store.errors`."""
    try:
        connect_once(host, port, timeout, dark_after=timeout).close()
    except StoreConnectionError as error:
        return error.reason
    return ""


def measure_rate(host: str, port: int, seconds: float) -> float:
    """Send for some time, and return the bytes per second that have arrived; 0 where the connection broke."""
    try:
        with connect_once(host, port, seconds * 5, dark_after=seconds * 5) as connection:
            connection.settimeout(seconds * 5)
            sent, start = 0, time.monotonic()
            while time.monotonic() < start + seconds:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return sent / (time.monotonic() - start)
    except (OSError, StoreConnectionError):
        return 0.0
