"""A connection between two agents: how each side sees its end, which decides about life and death of nodes."""

from __future__ import annotations

import errno
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.coordination_state import BROKEN, ENDED, SILENT
from elastic_run.loop import Loop
from elastic_run.rendezvous.coordination.link import DOCUMENT, Link, encode_frame
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEASE = 0.2


class Sides:
    """Two connected sides, each on a loop of its own, so that one of them can stand still.

    Attributes:
        near: One side; `far` is the other one.
        ends: How the connection has ended on each side.
    """

    def __init__(self) -> None:
        self.loops = Loop(), Loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.sockets = socket.create_connection(listener.getsockname()), listener.accept()[0]
        self.ends: list[list[str]] = [[], []]
        self.near, self.far = (
            Link(loop, one, lease=_LEASE) for loop, one in zip(self.loops, self.sockets, strict=True)
        )
        for link, ends in zip((self.near, self.far), self.ends, strict=True):
            link.on_end = lambda how, _, ends=ends: ends.append(how)  # type: ignore[misc]

    def run(self, side: int) -> str:
        """Let one side run until its connection has ended, and return how."""
        loop, ends = self.loops[side], self.ends[side]
        assert loop.run_until(lambda: bool(ends), loop.now() + DEADLINE)
        return ends[0]

    def close(self) -> None:
        """Close all."""
        for link, loop in zip((self.near, self.far), self.loops, strict=True):
            link.close()
            loop.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    """Return two connected sides."""
    made = Sides()
    yield made
    made.close()


def test_a_side_that_gives_up_the_other_is_not_dead_for_it(sides: Sides) -> None:
    """A side that stands still longer than the lease reads, when it goes on, that the other one lives."""
    sides.near.offer(b'{"a": 1}')
    assert sides.run(0) == SILENT
    assert sides.run(1) == BROKEN


def test_the_end_of_a_process_is_death(sides: Sides) -> None:
    """The kernel closes the connection of a process that ends; nothing was said before."""
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == ENDED


def test_a_side_that_parts_lives(sides: Sides) -> None:
    """A process that closes a connection says so before."""
    sides.near.part()
    assert sides.run(1) == BROKEN


def test_an_end_in_the_middle_of_a_frame_proves_nothing(sides: Sides) -> None:
    """It may be a living process that could not send the rest, nor say that it parts."""
    sides.sockets[0].send(encode_frame(DOCUMENT, {"a": 1})[:-1])
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == BROKEN


def test_a_reset_proves_nothing(sides: Sides) -> None:
    """Networks reset connections as well as kernels of processes that were killed."""
    sides.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sides.loops[0].remove_reader(sides.near.fileno())
    sides.sockets[0].close()
    assert sides.run(1) == BROKEN


@pytest.mark.parametrize(("number", "how"), [(errno.ETIMEDOUT, SILENT), (errno.ECONNRESET, BROKEN)])
def test_an_error_that_a_write_was_told_is_not_forgotten(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, number: int, how: str
) -> None:
    """The kernel tells an error once: to a write, after which reading finds the end of the stream, as after a death."""

    class Failing:
        """A socket whose next write is told the error."""

        def __getattr__(self, name: str) -> object:
            return getattr(sides.sockets[1], name)

        def send(self, _: bytes) -> int:
            raise OSError(number, "")

    monkeypatch.setattr(sides.far, "_socket", Failing())
    sides.far.send({"kind": "a message"})
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == how
