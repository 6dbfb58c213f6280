"""A blocking byte stream to a server, with a deadline on everything.

After a send or a reply that did not come off in time the stream is out of step, so it is closed and says so. Only
`fill` may run out of time and leave it in order: nothing was taken from it.

`close` may come from another thread: it wakes the threads that read, send or wait. The last thread that uses the
descriptor closes it: else the kernel could give its number to another file while a thread still waits on it.

A stream that broke in one thread fails in every other thread for the same reason: who reconnects has to know whether
the server was silent, or is gone.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.store.connecting import notice_darkness, reason_of
from elastic_run.store.errors import CLOSED, StoreConnectionError, StoreError, StoreTimeoutError

_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024


class Stream:
    """A connection that is read by numbers of bytes.

    Args:
        connected: The connection; the stream owns it from now on.
        name: The server for messages, such as `10.0.0.1:29400`.

    Attributes:
        reads_ahead: Whether to take more bytes than are asked for, where more have come. Without that, what another
            thread waits for stays in the socket, and wakes that thread.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.reads_ahead = True
        self._name = name
        self._reason = CLOSED
        self._buffer = b""
        self._offset = 0
        self._socket: socket.socket | None = connected
        self._closing: socket.socket | None = None
        self._lock = threading.Lock()
        self._users = 0

    def close(self) -> None:
        """Close the connection, from any thread; harmless when closed."""
        with self._lock:
            closing, self._socket = self._socket, None
            if closing is None:
                return
            self._closing = closing
            self._users += 1
        try:
            # The socket's own `shutdown`: that of a TLS socket would remove its state while another thread reads.
            socket.socket.shutdown(closing, socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more
        finally:
            self._leave()

    def notice_darkness(self, seconds: float) -> None:
        """Have the kernel break the connection when the server has given no sign for so long; nothing when closed."""
        with self._lock:
            if self._socket is not None:
                notice_darkness(self._socket, seconds)

    def _enter(self) -> socket.socket:
        """Begin to use the descriptor; `_leave` follows."""
        with self._lock:
            if self._socket is None:
                message = f"the connection to the store at {self._name} is closed"
                raise StoreConnectionError(message, self._reason)
            self._users += 1
            return self._socket

    def _leave(self) -> None:
        """Use the descriptor no longer; close it if the stream is closed and no other thread uses it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._closing is not None:
                self._closing.close()
                self._closing = None

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of this.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: The server did not take it in time.
        """
        open_socket = self._enter()
        try:
            open_socket.settimeout(min(timeout, LONGEST_WAIT))
            open_socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error
        finally:
            self._leave()

    def wait_input(self, timeout: float) -> None:
        """Wait until something has come, the connection is closed, or the time is over.

        Other threads may use the stream meanwhile, and may have taken what has come.

        Raises:
            StoreConnectionError: The connection is closed.
        """
        open_socket = self._enter()
        try:
            poll = select.poll()
            poll.register(open_socket, select.POLLIN)
            poll.poll(1000 * max(0.0, min(timeout, LONGEST_WAIT)))
        finally:
            self._leave()

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

    def has_data(self, timeout: float) -> bool:
        """Wait until at least one byte can be taken.

        Returns:
            Whether one can; False if the time was over first.

        Raises:
            StoreConnectionError: The connection is closed.
        """
        if self._offset == len(self._buffer):
            try:
                self.fill(1, timeout)
            except TimeoutError:
                return False
        return True

    def peek(self, timeout: float) -> bytes:
        """Return the bytes that are there, at least one, and leave them there.

        Raises:
            StoreConnectionError: The connection is closed.
            StoreTimeoutError: None came in time.
        """
        if not self.has_data(timeout):
            raise self._lost(TimeoutError())
        return self._buffer[self._offset :]

    def fileno(self) -> int:
        """Return the descriptor, to see whether anything has come.

        Raises:
            StoreConnectionError: The connection is closed.
        """
        open_socket = self._enter()
        self._leave()
        return open_socket.fileno()

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
        open_socket = self._enter()
        try:
            while missing > 0:
                open_socket.settimeout(max(min(deadline - time.monotonic(), LONGEST_WAIT), 1e-6))
                part = self._read(open_socket, missing)
                buffer += part
                missing -= len(part)
        finally:
            self._buffer = bytes(buffer)
            self._offset = 0
            self._leave()

    def _read(self, open_socket: socket.socket, missing: int) -> bytes:
        try:
            part = open_socket.recv(min(max(missing, _RECEIVE if self.reads_ahead else 0), _RECEIVE_MOST))
        except OSError as error:
            # The kernel's own verdict on a host that went dark has the same class, and a number.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            raise self._lost(error) from error
        if not part:
            raise self._lost(None)
        return part

    def _lost(self, error: OSError | None) -> StoreError:
        reason = CLOSED if error is None else reason_of(error)
        with self._lock:
            if self._socket is not None:
                self._reason = reason
        self.close()
        if isinstance(error, TimeoutError) and error.errno is None:
            return StoreTimeoutError(f"the store at {self._name} did not answer in time")
        message = f"the store at {self._name} closed the connection: {error or 'end of stream'}"
        return StoreConnectionError(message, reason)
