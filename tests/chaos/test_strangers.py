"""Random jobs beside processes that they did not start."""

from __future__ import annotations

from tests.chaos.strangers import run_jobs


def test_no_stranger_is_signalled_or_named() -> None:
    """Whatever workers, flags, surroundings and ends there are, and whatever a stranger has in common with the job."""
    run_jobs(range(12))
