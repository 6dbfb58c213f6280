"""A blocking byte stream to a server, with a deadline on everything.

After a send or a reply that did not come off in time the stream is out of step, so it is closed and says so. Only
`fill` may run out of time and leave it in order: nothing was taken from it.
"""

from __future__ import annotations

import socket
import time

from elastic_run.store import wire

_FIRST_RETRY = 0.01
_LAST_RETRY = 1.0
_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024


class Stream:
    """A connection that is read by numbers of bytes.

    Args:
        host: The server's name or address.
        port: The server's port.
        timeout: Seconds to try while nobody listens there.

    Raises:
        StoreConnectionError: Nobody did.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._name = f"{host}:{port}"
        self._buffer = b""
        self._offset = 0
        self._socket: socket.socket | None = _connect(host, port, timeout)

    def close(self) -> None:
        """Close the connection; harmless when closed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of this.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: The server did not take it in time.
        """
        open_socket = self._open_socket()
        try:
            open_socket.settimeout(timeout)
            open_socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, size: int, timeout: float) -> bytes:
        """Take so many bytes.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: They did not come in time.
        """
        if len(self._buffer) - self._offset < size:
            try:
                self.fill(size, timeout)
            except TimeoutError as error:
                raise self._lost(error) from error
        start, self._offset = self._offset, self._offset + size
        return self._buffer[start : self._offset]

    def fill(self, size: int, timeout: float) -> None:
        """Read until so many bytes can be taken.

        Raises:
            StoreConnectionError: The connection is closed.
            TimeoutError: They did not come in time; what came is kept.
        """
        open_socket = self._open_socket()
        deadline = time.monotonic() + timeout
        parts = [self._buffer[self._offset :]]
        missing = size - len(parts[0])
        try:
            while missing > 0:
                open_socket.settimeout(max(deadline - time.monotonic(), 1e-6))
                parts.append(self._read(open_socket, missing))
                missing -= len(parts[-1])
        finally:
            self._buffer = b"".join(parts)
            self._offset = 0

    def _read(self, open_socket: socket.socket, missing: int) -> bytes:
        try:
            part = open_socket.recv(min(max(missing, _RECEIVE), _RECEIVE_MOST))
        except TimeoutError:
            raise
        except OSError as error:
            raise self._lost(error) from error
        if not part:
            raise self._lost(None)
        return part

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            message = f"the connection to the store at {self._name} is closed"
            raise wire.StoreConnectionError(message)
        return self._socket

    def _lost(self, error: OSError | None) -> wire.StoreError:
        self.close()
        if isinstance(error, TimeoutError):
            return wire.StoreTimeoutError(f"the store at {self._name} did not answer in time")
        return wire.StoreConnectionError(f"the store at {self._name} closed the connection: {error or 'end of stream'}")


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect, again and again while nobody listens: servers and clients start in any order."""
    deadline = time.monotonic() + timeout
    delay = _FIRST_RETRY
    while True:
        left = deadline - time.monotonic()
        try:
            connected = socket.create_connection((host, port), max(left, 1e-3))
        except OSError as error:
            if left <= delay:
                message = f"no store answers at {host}:{port} within {timeout} s: {error}"
                raise wire.StoreConnectionError(message) from error
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
