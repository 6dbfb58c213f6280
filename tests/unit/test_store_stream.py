"""A byte stream to a server: what is taken, what stays, and what the end of the time means."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import StoreConnectionError, StoreTimeoutError
from elastic_run.store.tcpstore.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds in which nothing is to come, and in which a reader on this machine has what was sent.
_SHORT, _LONG = 0.01, 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    """Give a stream, and the server's end of its connection."""
    own, server = socket.socketpair()
    stream = Stream(own, "10.0.0.1:1")
    with server:
        yield stream, server
    stream.close()


def test_bytes_are_taken_by_number(ends: tuple[Stream, socket.socket]) -> None:
    """What has come beyond the number that was asked for is the beginning of the next answer."""
    stream, server = ends
    server.sendall(b"abcdef")
    assert stream.receive(2, _LONG) == b"ab"
    assert stream.receive(3, _LONG) == b"cde"
    assert stream.receive(1, _LONG) == b"f"


def test_waiting_for_data_may_end_without_harm(ends: tuple[Stream, socket.socket]) -> None:
    """If not all comes in time, `fill` says so and the stream goes on; what comes later is taken whole."""
    stream, server = ends
    server.sendall(b"a")
    with pytest.raises(TimeoutError):
        stream.fill(2, _SHORT)
    server.sendall(b"b")
    assert stream.receive(2, _LONG) == b"ab"


def test_a_late_answer_ends_the_stream(ends: tuple[Stream, socket.socket]) -> None:
    """After an answer that did not come in time the stream is out of step: it is closed, and says why."""
    stream, server = ends
    server.sendall(b"a")
    with pytest.raises(StoreTimeoutError, match=r"^the store at 10\.0\.0\.1:1 did not answer in time$"):
        stream.receive(2, _SHORT)
    with pytest.raises(StoreConnectionError):
        stream.send(b"x", _LONG)
    assert server.recv(1) == b""


def test_a_server_that_hangs_up_is_no_silent_one(ends: tuple[Stream, socket.socket]) -> None:
    """The end of the connection is told as such, at once."""
    stream, server = ends
    server.sendall(b"a")
    server.close()
    with pytest.raises(StoreConnectionError, match="closed the connection: end of stream"):
        stream.receive(2, _LONG)
