"""A blocking byte stream to a server, with a deadline on everything.

After a send or a reply that did not come off in time the stream is out of step, so it is closed and says so. Only
`fill` may run out of time and leave it in order: nothing was taken from it.
"""

from __future__ import annotations

import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.store.connecting import reason_of
from elastic_run.store.errors import CLOSED, StoreConnectionError, StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024


class Stream:
    """A connection that is read by numbers of bytes.

    Args:
        connected: The connection; the stream owns it from now on.
        name: The server for messages, such as `10.0.0.1:29400`.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        self._name = name
        self._reason = CLOSED
        self._buffer = b""
        self._offset = 0
        self._socket: socket.socket | None = connected

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
        connected = self._take_socket()
        try:
            connected.settimeout(min(timeout, LONGEST_WAIT))
            connected.sendall(data)
        except OSError as error:
            raise self._lose(error) from error

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
                raise self._lose(error) from error
        start, self._offset = self._offset, self._offset + size
        return self._buffer[start : self._offset]

    def fill(self, size: int, timeout: float) -> None:
        """Read until so many bytes can be taken.

        Raises:
            StoreConnectionError: The connection is closed.
            TimeoutError: They did not come in time; what came is kept.
        """
        deadline = time.monotonic() + timeout
        # One array: a peer that sends byte by byte would make a list of pieces fifty times as large as the bytes.
        buffer = bytearray(memoryview(self._buffer)[self._offset :])
        missing = size - len(buffer)
        connected = self._take_socket()
        try:
            while missing > 0:
                connected.settimeout(max(min(deadline - time.monotonic(), LONGEST_WAIT), 1e-6))
                part = self._read(connected, missing)
                buffer += part
                missing -= len(part)
        finally:
            self._buffer = bytes(buffer)
            self._offset = 0

    def _take_socket(self) -> socket.socket:
        if self._socket is None:
            message = f"the connection to the store at {self._name} is closed"
            raise StoreConnectionError(message, self._reason)
        return self._socket

    def _read(self, connected: socket.socket, missing: int) -> bytes:
        try:
            part = connected.recv(min(max(missing, _RECEIVE), _RECEIVE_MOST))
        except OSError as error:
            # The kernel's own verdict on a host that went dark has the same class, and a number.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            raise self._lose(error) from error
        if not part:
            raise self._lose(None)
        return part

    def _lose(self, error: OSError | None) -> StoreError:
        self._reason = CLOSED if error is None else reason_of(error)
        self.close()
        if isinstance(error, TimeoutError) and error.errno is None:
            return StoreTimeoutError(f"the store at {self._name} did not answer in time")
        message = f"the store at {self._name} closed the connection: {error or 'end of stream'}"
        return StoreConnectionError(message, self._reason)
