"""Agents are killed one after another, and nobody waits for the job to recover: the short version of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.deaths import Deaths, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kills_guardians", [False, True], ids=["agents", "guardians too"])
def test_every_sample_is_accounted_for(tmp_path: Path, kills_guardians: bool) -> None:
    """A kill every two seconds on three hosts, each with an endpoint: one job goes on, and no sample is lost.

    At length: python -m tests.chaos.deaths.
    """
    run(Deaths(seed=17, count=8, kills_guardians=kills_guardians), tmp_path, say=print)
