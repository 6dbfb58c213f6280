"""Opening a client's connection: reach the server, and see that it is a store.

Servers and clients start in any order, so it is tried again while nobody listens or answers.
"""

from __future__ import annotations

import os
import time

from elastic_run.store.connecting import connect_once, format_endpoint
from elastic_run.store.errors import FOREIGN, FULL, StoreConnectionError, StoreTimeoutError, make_full_error
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.stream import Stream

__all__ = ["open_stream"]

_FIRST_RETRY = 0.01
_LAST_RETRY = 0.5
_LEAST = 1e-3


def open_stream(host: str, port: int, timeout: float, *, tries_again: bool) -> Stream:
    """Open a connection.

    Args:
        host: The server's name or address.
        port: The server's port.
        timeout: Seconds for all of it; a host that goes dark later is noticed after as many.
        tries_again: Whether to go on trying, within the timeout, while nobody listens or answers.

    Raises:
        StoreConnectionError: The server can't be reached within the timeout, or isn't a TCPStore.
        StoreTimeoutError: The server took the connection and did not answer.
    """
    deadline = time.monotonic() + timeout
    delay = _FIRST_RETRY
    while True:
        left = deadline - time.monotonic()
        try:
            return _open_once(host, port, max(left, _LEAST), dark_after=timeout)
        except StoreConnectionError as error:
            if not tries_again:
                raise
            if left <= delay or error.reason == FOREIGN:
                message = f"no store answers at {host}:{port} within {timeout} s: {error}"
                raise StoreConnectionError(message, error.reason, cause=error.cause) from error
        time.sleep(delay)
        delay = min(2 * delay, _LAST_RETRY)


def _open_once(host: str, port: int, timeout: float, *, dark_after: float) -> Stream:
    """Connect and exchange the first messages; the errors say at which address."""
    connected = connect_once(host, port, timeout, dark_after=dark_after)
    try:
        address = format_endpoint(*connected.getpeername()[:2])
    except OSError:
        address = format_endpoint(host, port)  # it is closed already; the first message will say so
    stream = Stream(connected, f"{host}:{port}")
    try:
        _greet(stream, timeout)
    except StoreTimeoutError as error:
        message = f"{address} takes connections but sends no answer: the store hangs, or another program has that port"
        raise StoreTimeoutError(message) from error
    except StoreConnectionError as error:
        stream.close()
        if error.reason == FOREIGN:
            message = f"what listens at {address} is not a TCPStore"
            raise StoreConnectionError(message, FOREIGN) from error
        if error.reason == FULL:
            message = f"the store at {address} {error}"
            raise StoreConnectionError(message, FULL) from error
        message = f"{address} closes connections without an answer: a store that is about to end, or another program"
        raise StoreConnectionError(str(error), error.reason, cause=message) from error
    except BaseException:
        stream.close()
        raise
    return stream


def _greet(stream: Stream, timeout: float) -> None:
    """Open the connection as torch's clients do."""
    nonce = os.getpid() & 0xFFFFFFFF
    stream.send(wire.encode_opening(nonce), timeout)
    answer = wire.U32.unpack(stream.receive(wire.U32.size, timeout))[0]
    if answer == wire.STORE_FULL:
        raise make_full_error(wire.U32.unpack(stream.receive(wire.U32.size, timeout))[0])
    if answer != nonce:
        message = "the answer is not a TCPStore's"
        raise StoreConnectionError(message, FOREIGN)
