"""Writing to a descriptor that cannot be opened again."""

from __future__ import annotations

import os
import pty
import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.sink import CautiousSink

if TYPE_CHECKING:
    from collections.abc import Iterator


class Optimist:
    """A poll that always sees room: others take it between the look and the write."""

    def register(self, fd: int, events: int) -> None:
        """Accept a descriptor."""

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Say that there is room."""
        return [(-1, int(timeout))]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Give a pipe whose writing end somebody has made non-blocking."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_room_that_is_gone_in_the_middle(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """When a non-blocking descriptor fills up within a write, what it took by then is told, so nothing comes twice."""
    monkeypatch.setattr("select.poll", Optimist)
    reading, writing = pipe
    sink = CautiousSink(writing)
    data = os.urandom(1 << 20)
    done = sink.write(data)
    assert os.read(reading, len(data)) == data[:done]
    assert 0 < done < len(data)


def test_no_room_at_all(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing fits that is told as a non-blocking descriptor tells it."""
    monkeypatch.setattr("select.poll", Optimist)
    sink = CautiousSink(pipe[1])
    sink.write(b"x" * (1 << 20))
    with pytest.raises(BlockingIOError):
        sink.write(b"x")


@pytest.mark.parametrize("offset", range(0, 260, 20))
def test_a_terminal_that_nobody_reads(offset: int) -> None:
    """A terminal that fills up never takes a part of a step: the launcher would wait there until somebody reads."""
    reading, writing = pty.openpty()
    os.write(writing, b"x" * offset)
    sink = CautiousSink(writing)
    taken: list[int] = []
    data = b"".join(b"%09d\n\tdone\r\xc3\xa9\n" % number for number in range(4000))

    def fill() -> None:
        try:
            while True:
                taken.append(sink.write(data[sum(taken) :]))
        except OSError:
            pass  # it is full, or the test has closed the other end

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(10)
    has_returned = not thread.is_alive()
    os.close(reading)
    thread.join()
    os.close(writing)
    assert has_returned
    assert 0 < sum(taken) < len(data)
