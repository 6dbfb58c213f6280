"""When a worker has last written, and its last line, as `elastic-run status` shows it."""

from __future__ import annotations

import pytest

from elastic_run.multiprocessing.output.activity import SILENCE, Activity


def test_the_first_output_and_each_silence_are_told() -> None:
    """A silence is told by the output that ends it, with its seconds; output without a pause tells nothing."""
    told: list[tuple[int, float | None]] = []
    activity = Activity(3, 100.0, lambda *what: told.append(what))
    for now in (101.0, 102.0, 102.0 + SILENCE, 103.0 + SILENCE, 203.0 + SILENCE):
        activity.note(now)
    assert told == [(3, None), (3, SILENCE), (3, 100.0)]
    assert activity.last == 203.0 + SILENCE


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ((), ""),
        ((b"step 1\nst", b"ep 2\n", b"\n"), "step 2"),
        ((b"10 %\r20 %", b"\r30 %"), "30 %"),
        ((b"before\n", b"x" * 600), "x" * 512),
        ((b"x" * 600, b"y" * 12), "x" * 500 + "y" * 12),
    ],
)
def test_the_last_line_is_kept_whatever_pieces_it_comes_in(pieces: tuple[bytes, ...], line: str) -> None:
    """The last line that isn't blank is shown, of a long line its end; each redrawn bar counts as a line."""
    activity = Activity(0, 0.0, lambda *_: None)
    for piece in pieces:
        activity.keep(piece)
    assert activity.last_line == line
