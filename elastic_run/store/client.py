"""A TCPStore client without torch: blocking, over one socket, with the names of torch's Store.

- It has the few operations that a probe and small programs need, and speaks to our server and to torch's alike. Servers
  and clients start in any order, so the connection is tried again while nobody listens or answers.
- One client belongs to one thread at a time. Keys get a slash, as torch's TCPStore puts one before them.
- What answers needn't be a store: an answer has a bound. After an answer that is longer, or did not come in time, the
  stream is out of step: the client is closed.
"""

from __future__ import annotations

import os
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.store import wire
from elastic_run.store.connecting import Backoff, connect_once, format_endpoint, reason_of
from elastic_run.store.errors import FOREIGN, StoreConnectionError, StoreTimeoutError
from elastic_run.store.wire import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self  # for the type checker only: typing has it from Python 3.11 on

_FIRST_RETRY = 0.02
_LAST_RETRY = 0.5
_LEAST = 1e-3
_RECEIVE_MOST = 1024 * 1024
#: Keys that a message names.
_NAMED = 5


class StoreClient:
    """A connection to a TCPStore; the timeout is for the server to listen, for a reply, and for keys."""

    def __init__(self, host: str, port: int, timeout: float = 300.0) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._name = format_endpoint(host, port)
        deadline, pauses = time.monotonic() + timeout, Backoff(_FIRST_RETRY, _LAST_RETRY)
        while True:
            try:
                self._open(max(deadline - time.monotonic(), _LEAST))
            except StoreConnectionError as error:
                pause = pauses.next_pause()
                if time.monotonic() + pause > deadline or error.reason == FOREIGN:
                    message = f"no store answers at {self._name} within {timeout} s: {error}"
                    raise StoreConnectionError(message, error.reason, cause=error.cause) from error
            else:
                return
            time.sleep(pause)

    def _open(self, timeout: float) -> None:
        self._socket = connect_once(self.host, self.port, timeout, dark_after=self.timeout)
        nonce = os.getpid() & 0xFFFFFFFF
        self._send(wire.encode_opening(nonce))
        if wire.U32.unpack(self._receive(wire.U32.size, timeout))[0] != nonce:
            self.close()
            message = f"what listens at {self._name} is not a TCPStore"
            raise StoreConnectionError(message, FOREIGN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; harmless when closed."""
        self._socket.close()

    # --- operations --------------------------------------------------------------------------------------------------
    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value. There is no reply: a refusal shows at the next operation."""
        self._ask(wire.SET, _encode(key), value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait for a key, up to the timeout (`StoreTimeoutError`), and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys, up to the timeout (`StoreTimeoutError`), and return their values."""
        self.wait(keys)
        self._ask(wire.MULTI_GET, len(keys), *map(_encode, keys))
        return [self._receive(wire.U64.unpack(self._receive(wire.U64.size))[0]) for _ in keys]

    def add(self, key: str, amount: int) -> int:
        """Count a key up, from 0 if it is missing, and return the sum."""
        self._ask(wire.ADD, _encode(key), amount)
        number: int = wire.I64.unpack(self._receive(wire.I64.size))[0]
        return number

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Wait until all keys are there, for so many seconds (`StoreTimeoutError`); the client's timeout if None."""
        timeout = self.timeout if timeout is None else timeout
        self._ask(wire.WAIT, len(keys), *map(_encode, keys))
        try:
            self._receive(1, timeout)
        except StoreTimeoutError as error:
            more = " …" if len(keys) > _NAMED else ""
            message = f"not within {timeout} s: {', '.join(map(repr, keys[:_NAMED]))}{more}"
            raise StoreTimeoutError(message) from error

    # --- bytes -------------------------------------------------------------------------------------------------------
    def _ask(self, operation: int, *fields: bytes | int) -> None:
        self._send(wire.encode(operation, *fields))

    def _send(self, data: bytes) -> None:
        self._room = MESSAGE_LIMIT  # for the bytes of the answer
        try:
            self._socket.settimeout(min(self.timeout, LONGEST_WAIT))
            self._socket.sendall(data)
        except OSError as error:
            raise self._lose(error) from error

    def _receive(self, size: int, timeout: float | None = None) -> bytes:
        self._room -= size
        if self._room < 0:
            self.close()
            message = f"the store at {self._name} answers with more than {MESSAGE_LIMIT} bytes"
            raise StoreConnectionError(message)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        # One array: a peer that sends byte by byte would make a list of pieces fifty times as large as the bytes.
        data = bytearray()
        try:
            while len(data) < size:
                self._socket.settimeout(max(min(deadline - time.monotonic(), LONGEST_WAIT), 1e-6))
                part = self._socket.recv(min(size - len(data), _RECEIVE_MOST))
                if not part:
                    message = "end of stream"
                    raise ConnectionError(message)
                data += part
        except OSError as error:
            raise self._lose(error) from error
        return bytes(data)

    def _lose(self, error: OSError) -> StoreConnectionError | StoreTimeoutError:
        self.close()
        # The kernel's verdict on a host that went dark has the same class, and a number.
        if isinstance(error, TimeoutError) and error.errno is None:
            message = f"{self._name} takes connections but sends no answer: the store hangs, or another program listens"
            return StoreTimeoutError(message)
        return StoreConnectionError(f"the store at {self._name} closed the connection: {error}", reason_of(error))


def _encode(key: str) -> bytes:
    return b"/" + key.encode()
