"""Writing to a descriptor that cannot be opened again."""

from __future__ import annotations

import os
import pty
import threading

import pytest

from elastic_run.multiprocessing.output.sink import CautiousSink


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
