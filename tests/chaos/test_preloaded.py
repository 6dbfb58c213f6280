"""Warm workers with pools, data loaders and collectives: the short version of `python -m tests.chaos.preloaded`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

#: Its workers take all parts but the compiler's, which alone takes longer than the others together.
_SEED = "1"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_warm_workers_end_after_a_start_and_two_restarts(launch: Launch) -> None:
    """Jobs under --preload end with 0, whatever processes and threads their workers leave to the interpreter's end."""
    command = (sys.executable, "-m", "tests.chaos.preloaded")
    job = launch("--starts", "1", "--restarts", "2", "--seed", _SEED, program=command, cwd=Path(__file__).parents[2])
    assert job.wait_exit(deadline=200) == 0, job.stdout
    assert "1 starts and 2 restarts" in job.stdout
