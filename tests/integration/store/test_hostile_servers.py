"""Servers that are none of ours and answer without end: our side takes a bounded part, and says so."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.link import MESSAGE, encode_frame
from elastic_run.rendezvous.coordination.opening import Hello, ask
from elastic_run.store.errors import FOREIGN, StoreConnectionError
from elastic_run.store.tcpstore import client, wire
from elastic_run.store.tcpstore.client import StoreClient
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PIECE = b"x" * 65536


class Flood:
    """A server that answers a client's opening, then sends bytes for as long as the client takes them.

    Args:
        answer: What it sends first.
        repeats: Whether it repeats the opening first, as a TCPStore does.
    """

    def __init__(self, answer: bytes, *, repeats: bool = True) -> None:
        self._answer, self._repeats = answer, repeats
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            opening = connection.recv(64)
            connection.sendall((opening[-4:] if self._repeats else b"") + self._answer)
            with suppress(OSError):  # until the client hangs up
                while True:
                    self.sent += connection.send(_PIECE)

    def close(self) -> None:
        """Wait for the end of the one connection."""
        self._listener.close()
        self._thread.join(DEADLINE)


@pytest.fixture
def flood() -> Iterator[Callable[..., Flood]]:
    """Make servers, and see that they end."""
    made = []

    def make(answer: bytes, *, repeats: bool = True) -> Flood:
        made.append(Flood(answer, repeats=repeats))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (wire.U64.pack((1 << 64) - 1), lambda client: client.compare_set("k", "", "v")),
        (b"\0" + 3 * (wire.U64.pack(100_000) + 100_000 * b"x"), lambda client: client.multi_get(["a", "b", "c"])),
        (wire.I64.pack(1 << 60), lambda client: client.list_keys()),
        (wire.I64.pack(-1), lambda client: client.list_keys()),
    ],
    ids=["endless string", "many strings", "endless list", "negative list"],
)
def test_an_answer_of_a_store_is_bounded(
    flood: Callable[..., Flood],
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    ask: Callable[[StoreClient], object],
) -> None:
    """A store that answers with more than the bound is hung up on, and named."""
    monkeypatch.setattr(client, "MESSAGE_LIMIT", 250_000)
    server = flood(answer)
    with (
        StoreClient("127.0.0.1", server.port, DEADLINE) as asking,
        pytest.raises(StoreConnectionError, match=rf":{server.port} answers with more than 250000 bytes"),
    ):
        ask(asking)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\xff\xff\xff\xffM",
        encode_frame(MESSAGE, {"role": "?", "standing": 1}),
        _PIECE,
    ],
    ids=["another protocol", "a frame of 4 GB", "no answer of ours", "endless bytes"],
)
def test_what_answers_like_no_agent_is_named_at_once(flood: Callable[..., Flood], answer: bytes) -> None:
    """An agent that meets another program at its endpoint takes some kilobytes of it, and says what it has met."""
    server = flood(answer, repeats=False)
    with pytest.raises(StoreConnectionError, match=f"what listens at 127.0.0.1:{server.port} is no agent") as caught:
        ask(("127.0.0.1", server.port), Hello("j", "n", "h", "1"), DEADLINE, None, dark_after=DEADLINE)
    assert caught.value.reason == FOREIGN
    assert server.sent < 16 << 20  # most of it is in the kernel's buffers
