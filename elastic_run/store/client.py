"""A TCPStore client without torch: blocking, over one socket, with the names of torch's Store.

Rules
- It speaks to our server and to torch's alike. Servers and clients start in any order, so the connection is tried
  again while nobody listens or answers.
- It has the few operations that a probe and small programs need; torch's own clients have the others.
- One client belongs to one thread at a time. A wait occupies the connection.
- Keys get a slash, as torch's TCPStore puts one before them. Keys and values may be str or bytes, values come back as
  bytes.
- What answers needn't be a store of ours: an answer has a bound, above which the client is closed and says so.
- After a message or a reply that did not pass in time the stream is out of step: the client is closed and says so. Only
  a wait for keys may run out of time: nothing was read then.
"""

from __future__ import annotations

import os
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.store import wire
from elastic_run.store.connecting import connect_once, format_endpoint, reason_of
from elastic_run.store.errors import (
    CLOSED,
    FOREIGN,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from elastic_run.store.wire import COUNT_LIMIT, KEY_LIMIT, MESSAGE_LIMIT, VALUE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self  # for the type checker only: typing has it from Python 3.11 on

_FIRST_RETRY = 0.01
_LAST_RETRY = 0.5
_LEAST = 1e-3
_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024
#: Keys that a message names.
_NAMED = 5


class StoreClient:
    """A connection to a TCPStore.

    The timeout is for the server to listen, for a reply, and for keys. Raises `StoreConnectionError` if the server
    can't be reached within it, or isn't a TCPStore, and `StoreTimeoutError` if it took the connection and is silent.
    """

    def __init__(self, host: str, port: int, timeout: float = 300.0) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._name = f"{host}:{port}"
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._offset = 0
        self._room = MESSAGE_LIMIT
        self._reason = CLOSED
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; harmless when closed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- values --------------------------------------------------------------------------------------------------
    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Give a key a value. There is no reply: a refusal shows at the next operation."""
        self._ask(wire.SET, self._key(key), encode_value(value))

    def get(self, key: str | bytes) -> bytes:
        """Wait for a key, up to the timeout (`StoreTimeoutError`), and return its value."""
        self.wait([key])
        self._ask(wire.GET, self._key(key))
        return self._receive_string()

    def add(self, key: str | bytes, amount: int) -> int:
        """Count a key up, from 0 if it is missing, and return the sum."""
        self._ask(wire.ADD, self._key(key), amount)
        return self._receive_number()

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Wait for keys, up to the timeout (`StoreTimeoutError`), and return their values."""
        self.wait(keys)
        self._ask(wire.MULTI_GET, *self._list(keys))
        return [self._receive_string() for _ in keys]

    # --- waiting -------------------------------------------------------------------------------------------------
    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all these keys are there."""
        self._ask(wire.CHECK, *self._list(keys))
        return self._receive(1) == wire.READY

    def wait(self, keys: Sequence[str | bytes], timeout: float | None = None) -> None:
        """Wait until all keys are there, for so many seconds (`StoreTimeoutError`); the client's timeout if None."""
        timeout = self.timeout if timeout is None else timeout
        self._ask(wire.WAIT, *self._list(keys))
        if not self._wait_over(timeout):
            more = " …" if len(keys) > _NAMED else ""
            message = f"not within {timeout} s: {', '.join(map(repr, keys[:_NAMED]))}{more}"
            raise StoreTimeoutError(message)

    def _wait_over(self, timeout: float) -> bool:
        """Wait for a wait's end, or call it off; return whether it was over by itself."""
        try:
            self._fill(1, timeout)
        except TimeoutError:
            self._ask(wire.CANCEL_WAIT)
            if self._receive(1) == wire.WAIT_CANCELLED:
                return False
            # The end crossed with the cancellation, which has its own reply. What was waited for is there.
            self._receive(1)
            return True
        return self._receive(1) == wire.WAIT_OVER

    # --- messages ------------------------------------------------------------------------------------------------
    def _ask(self, operation: int, *fields: bytes | int) -> None:
        self._room = MESSAGE_LIMIT
        self._send(wire.encode(operation, *fields), self.timeout)

    def _receive_number(self) -> int:
        number: int = wire.I64.unpack(self._receive(wire.I64.size))[0]
        return number

    def _receive_string(self) -> bytes:
        size = wire.U64.unpack(self._receive(wire.U64.size))[0]
        self._reserve(size + wire.U64.size)
        return self._receive(size)

    def _reserve(self, size: int) -> None:
        """Count the bytes of an answer, before they are read."""
        if size > self._room:
            self.close()
            message = f"the store at {self._name} answers with more than {MESSAGE_LIMIT} bytes"
            raise StoreConnectionError(message)
        self._room -= size

    def _key(self, key: str | bytes) -> bytes:
        prefixed = b"/" + (key.encode() if isinstance(key, str) else key)
        if len(prefixed) > KEY_LIMIT:
            message = f"a key of {len(prefixed)} bytes, over the limit of {KEY_LIMIT}"
            raise ValueError(message)
        return prefixed

    def _list(self, keys: Sequence[str | bytes]) -> list[bytes | int]:
        if len(keys) > COUNT_LIMIT:
            message = f"{len(keys)} keys at once, over the limit of {COUNT_LIMIT}"
            raise ValueError(message)
        return [len(keys), *map(self._key, keys)]

    # --- bytes ---------------------------------------------------------------------------------------------------
    def _send(self, data: bytes, timeout: float) -> None:
        connected = self._connected()
        try:
            connected.settimeout(min(timeout, LONGEST_WAIT))
            connected.sendall(data)
        except OSError as error:
            raise self._lose(error) from error

    def _receive(self, size: int, timeout: float | None = None) -> bytes:
        if len(self._buffer) - self._offset < size:
            try:
                self._fill(size, self.timeout if timeout is None else timeout)
            except TimeoutError as error:
                raise self._lose(error) from error
        start, self._offset = self._offset, self._offset + size
        return self._buffer[start : self._offset]

    def _fill(self, size: int, timeout: float) -> None:
        """Read until so many bytes are there; raise TimeoutError if they did not come in time: what came is kept."""
        deadline = time.monotonic() + timeout
        # One array: a peer that sends byte by byte would make a list of pieces fifty times as large as the bytes.
        buffer = bytearray(memoryview(self._buffer)[self._offset :])
        connected = self._connected()
        try:
            while (missing := size - len(buffer)) > 0:
                connected.settimeout(max(min(deadline - time.monotonic(), LONGEST_WAIT), 1e-6))
                part = connected.recv(min(max(missing, _RECEIVE), _RECEIVE_MOST))
                if not part:
                    raise self._lose(None)
                buffer += part
        except OSError as error:
            if isinstance(error, StoreConnectionError) or _is_timeout(error):
                raise
            raise self._lose(error) from error
        finally:
            self._buffer = bytes(buffer)
            self._offset = 0

    def _connected(self) -> socket.socket:
        if self._socket is None:
            message = f"the connection to the store at {self._name} is closed"
            raise StoreConnectionError(message, self._reason)
        return self._socket

    def _lose(self, error: OSError | None) -> StoreError:
        self._reason = CLOSED if error is None else reason_of(error)
        self.close()
        if error is not None and _is_timeout(error):
            return StoreTimeoutError(f"the store at {self._name} did not answer in time")
        message = f"the store at {self._name} closed the connection: {error or 'end of stream'}"
        return StoreConnectionError(message, self._reason)

    # --- opening -------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        deadline = time.monotonic() + self.timeout
        delay = _FIRST_RETRY
        while True:
            left = deadline - time.monotonic()
            try:
                self._open_once(max(left, _LEAST))
            except StoreConnectionError as error:
                if left <= delay or error.reason == FOREIGN:
                    message = f"no store answers at {self._name} within {self.timeout} s: {error}"
                    raise StoreConnectionError(message, error.reason, cause=error.cause) from error
            else:
                return
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def _open_once(self, timeout: float) -> None:
        """Connect and exchange the first messages; the errors say at which address."""
        self._buffer, self._offset = b"", 0
        self._socket = connect_once(self.host, self.port, timeout, dark_after=self.timeout)
        try:
            address = format_endpoint(*self._socket.getpeername()[:2])
        except OSError:
            address = format_endpoint(self.host, self.port)  # it is closed already; the first message will say so
        nonce = os.getpid() & 0xFFFFFFFF
        try:
            self._send(wire.encode_opening(nonce), timeout)
            answer = wire.U32.unpack(self._receive(wire.U32.size, timeout))[0]
        except StoreTimeoutError as error:
            message = (
                f"{address} takes connections but sends no answer: the store hangs, or another program has that port"
            )
            raise StoreTimeoutError(message) from error
        except StoreConnectionError as error:
            cause = f"{address} closes connections without an answer: a store that is about to end, or another program"
            raise StoreConnectionError(str(error), error.reason, cause=cause) from error
        if answer != nonce:
            self.close()
            message = f"what listens at {address} is not a TCPStore"
            raise StoreConnectionError(message, FOREIGN)


def _is_timeout(error: OSError) -> bool:
    """Whether our own time was over: the kernel's verdict on a host that went dark has the same class, and a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def encode_value(value: str | bytes) -> bytes:
    """Return a value as it is sent; raise ValueError if it is over the limit."""
    encoded = value.encode() if isinstance(value, str) else value
    if len(encoded) > VALUE_LIMIT:
        message = f"a value of {len(encoded)} bytes, over the limit of {VALUE_LIMIT}"
        raise ValueError(message)
    return encoded
