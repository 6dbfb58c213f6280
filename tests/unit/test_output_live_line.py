"""The line that is rewritten on a terminal while nodes are awaited: it never stays beside other output."""

from __future__ import annotations

from tests.support.stream_bench import Bench

_ERASED = b"\r\x1b[J"


def test_the_line_goes_when_something_is_written() -> None:
    """And when it is hidden, once."""
    bench = Bench()
    assert bench.stream.show_line(b"waiting for 2 nodes")
    assert bench.got == b"\rwaiting for 2 nodes\x1b[J\r"
    bench.stream.hide_line()
    bench.stream.hide_line()
    assert bench.got == b"\rwaiting for 2 nodes\x1b[J\r" + _ERASED
    assert bench.stream.show_line(b"waiting for 1 node")
    bench.reader.got = b""
    source = bench.lines(b"")
    source.add(b"a line\n")
    assert bench.got == _ERASED + b"a line\n"


def test_no_line_is_shown_within_a_line_of_a_worker() -> None:
    """Nor while the terminal takes nothing."""
    bench = Bench()
    bench.pass_through().add(b"half a line")
    assert not bench.stream.show_line(b"waiting for 2 nodes")
    assert bench.got == b"half a line"
