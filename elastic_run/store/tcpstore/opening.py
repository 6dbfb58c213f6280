"""Opening a client's connection: reach the server, see that it is a store, and have it prove the token if there is one.

Rules
- Servers and clients start in any order, so it is tried again while nobody listens or answers.
- With a token the server is challenged first. A server that closes the connection for that is opened once more without
  a challenge: torch's own answers then, and is used with a warning (`ClientAuthentication`). Ours wants a proof.
- An agent without a token says so by its nonce. A server of ours tells by another answer whether it has a token.
"""

from __future__ import annotations

import os
import time

from elastic_run.store.connecting import connect_once
from elastic_run.store.errors import (
    CLOSED,
    FOREIGN,
    FULL,
    StoreConnectionError,
    StoreTimeoutError,
    StoreTokenError,
    make_full_error,
)
from elastic_run.store.stream import Stream
from elastic_run.store.tcpstore import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.store.tcpstore.token_proof import ClientAuthentication

__all__ = ["Opening"]

_FIRST_RETRY = 0.01
_LAST_RETRY = 0.5
_LEAST = 1e-3


class Opening:
    """What it takes to open one connection.

    Args:
        host: The server's name or address.
        port: The server's port.
        timeout: Seconds for all of it; a host that goes dark later is noticed after as many.
        is_agent: Whether the client uses the agents' keys.
        authentication: Of an agent whose job has a token.

    Attributes:
        proof: What must go out in front of the first question; empty for nothing.
        is_extended: Whether the server is ours, and has the operations that torch's doesn't have.
    """

    def __init__(
        self, host: str, port: int, timeout: float, *, is_agent: bool, authentication: ClientAuthentication | None
    ) -> None:
        self.proof = b""
        self.is_extended = False
        self._host = host
        self._port = port
        self._timeout = timeout
        self._name = _write_address((host, port))
        self._authentication = authentication
        self._nonce = wire.AGENT_NONCE if is_agent else os.getpid() & 0xFFFFFFFF

    def open(self, *, tries_again: bool) -> Stream:
        """Open the connection.

        Args:
            tries_again: Whether to go on trying, within the timeout, while nobody listens or answers.

        Raises:
            StoreConnectionError: The server can't be reached within the timeout, or isn't a TCPStore.
            StoreTimeoutError: The server took the connection and did not answer.
            StoreTokenError: The server's token is another one than ours, or one of both has none.
        """
        deadline = time.monotonic() + self._timeout
        delay = _FIRST_RETRY
        while True:
            left = deadline - time.monotonic()
            try:
                return self._open_once(max(left, _LEAST))
            except StoreConnectionError as error:
                if not tries_again:
                    raise
                if left <= delay or error.reason == FOREIGN:
                    message = f"no store answers at {self._host}:{self._port} within {self._timeout} s: {error}"
                    raise StoreConnectionError(message, error.reason, cause=error.cause) from error
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def _open_once(self, timeout: float) -> Stream:
        authentication = self._authentication
        if authentication is None:
            return self._connect(timeout, self._greet)
        if authentication.is_foreign:
            try:
                return self._connect(timeout, self._greet)
            except StoreTokenError:
                authentication.is_foreign = False  # another server has taken its place
        try:
            return self._connect(timeout, self._challenge)
        except StoreConnectionError as error:
            if error.reason != CLOSED or not authentication.accepts_foreign:
                raise
            return self._try_foreign(authentication, timeout, error)

    def _try_foreign(self, authentication: ClientAuthentication, timeout: float, error: StoreConnectionError) -> Stream:
        """Open a store that has closed a connection on which it was challenged."""
        try:
            stream = self._connect(timeout, self._greet)
        except StoreTokenError:
            raise error from None  # it is ours, and can check the token: the next challenge will tell
        authentication.accept_foreign(self._name)
        return stream

    def _connect(self, timeout: float, exchange: Callable[[Stream, float], None]) -> Stream:
        """Connect and exchange the first messages; the errors say at which address."""
        connected = connect_once(self._host, self._port, timeout, dark_after=self._timeout)
        try:
            address = _write_address(connected.getpeername()[:2])
        except OSError:
            address = self._name  # it is closed already; the first message will say so
        stream = Stream(connected, f"{self._host}:{self._port}")
        self.is_extended = False
        try:
            exchange(stream, timeout)
        except StoreTimeoutError as error:
            fact = f"{address} takes connections but sends no answer"
            message = f"{fact}: the store hangs, or another program has that port"
            raise StoreTimeoutError(message) from error
        except StoreConnectionError as error:
            stream.close()
            if error.reason == FOREIGN:
                message = f"what listens at {address} is not a TCPStore"
                raise StoreConnectionError(message, FOREIGN) from error
            if error.reason == FULL:
                message = f"the store at {address} {error}"
                raise StoreConnectionError(message, FULL) from error
            message = (
                f"{address} closes connections without an answer: a store that is about to end, or another program"
            )
            raise StoreConnectionError(str(error), error.reason, cause=message) from error
        except BaseException:
            stream.close()
            raise
        return stream

    def _challenge(self, stream: Stream, timeout: float) -> None:
        if self._authentication is not None:
            self.proof = self._authentication.challenge(stream, self._name, timeout)
            self.is_extended = True

    def _greet(self, stream: Stream, timeout: float) -> None:
        """Open the connection as torch's clients do."""
        stream.send(wire.encode_opening(self._nonce), timeout)
        answer = wire.U32.unpack(stream.receive(wire.U32.size, timeout))[0]
        if answer == wire.PROOF_WANTED and self._nonce == wire.AGENT_NONCE:
            message = f"the job at {self._name} has a token, and this node was given none"
            raise StoreTokenError(message)
        if answer == wire.STORE_FULL:
            raise make_full_error(wire.U32.unpack(stream.receive(wire.U32.size, timeout))[0])
        self.is_extended = answer == wire.EXTENDED and self._nonce == wire.AGENT_NONCE
        if answer != self._nonce and not self.is_extended:
            message = "the answer is not a TCPStore's"
            raise StoreConnectionError(message, FOREIGN)


def _write_address(address: tuple[str, int]) -> str:
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
