"""The rules of a job of several nodes, in simulated jobs among random faults; `tests.coordination.search` runs more."""

from __future__ import annotations

import pytest

from tests.coordination.search import run_job
from tests.coordination.walk import run_walk


@pytest.mark.parametrize("choice", ["majority", "lease", "only_one"])
def test_no_job_forks_or_stands_still(choice: str) -> None:
    """In 40 jobs among faults no round forks, no budget is lost, and each job that can form forms."""
    for seed in range(40):
        run_job(seed, choice)


@pytest.mark.long
def test_no_job_without_a_clock_forks() -> None:
    """In 50 jobs whose messages come in any order no two rounds go on beside each other."""
    for seed in range(50):
        run_walk(seed)
