"""What a worker says of the ranks that do not come."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.worker.joining import RankBarrier
from elastic_run.worker.place import Place


@pytest.mark.parametrize(("missing", "told"), [(8, "6, 7, 8 (did"), (9, "6, 7, 8 and 1 more (did")])
def test_eight_missing_ranks_are_named(missing: int, told: str) -> None:
    """Of more the number is told."""
    nobody: Any = SimpleNamespace(check=lambda _: False)
    barrier = RankBarrier(Place(0, missing + 1, 0, 1, "environment"), nobody, dt.timedelta(seconds=1))
    error = barrier.failure("not all have come", RuntimeError("timeout"), noted="host")
    assert f"{missing} of {missing + 1} missing: rank 1, 2, 3, 4, 5, {told}" in str(error)
