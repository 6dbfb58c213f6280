"""`elastic-run logs`: how its values are read."""

from __future__ import annotations

import pytest

from elastic_run.cli.commands.logs import _read_span


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5d", 129_600.0)]
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    """`--since=10m` is ten minutes."""
    assert _read_span(text) == seconds
