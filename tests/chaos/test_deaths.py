"""Agents are killed one after another, and nobody waits for the job to recover: the short versions of two commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import schedules
from tests.chaos.deaths import Deaths, run
from tests.chaos.schedules import Schedule

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kills_guardians", [False, True], ids=["agents", "guardians too"])
def test_every_sample_is_accounted_for(tmp_path: Path, kills_guardians: bool) -> None:  # noqa: FBT001 - a case
    """A kill every two seconds on three hosts, each with an endpoint: one job goes on, and no sample is lost.

    At length: python -m tests.chaos.deaths.
    """
    run(Deaths(seed=17, count=8, kills_guardians=kills_guardians), tmp_path, say=print)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(0.0, "after-halt", "twice"),
        Schedule(0.5, "after-join", "works"),
        Schedule(0.5, "before", "killed"),
        Schedule(3.0, "after-ready", "late"),
        Schedule(10.0, "after-join", "wrong"),
    ],
    ids=str,
)
def test_two_deaths_in_any_order_leave_one_job(schedule: Schedule, tmp_path: Path) -> None:
    """Whatever comes first, and whoever proves the first death, one job goes on, and all nodes train in it again.

    All orders: python -m tests.chaos.schedules.
    """
    schedules.run(schedule, tmp_path, say=print)
