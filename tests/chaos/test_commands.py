"""The short versions of this directory's commands: agents killed one after another, strangers, warm workers, pauses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.deaths import Deaths, run
from tests.chaos.paused_coordinator import STORES, reproduce
from tests.chaos.strangers import run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "kills_guardians",
    [pytest.param(False, id="agents", marks=pytest.mark.soak), pytest.param(True, id="guardians too")],
)
def test_every_sample_is_accounted_for(tmp_path: Path, kills_guardians: bool) -> None:
    """A kill every two seconds on three hosts, each with an endpoint: one job goes on, and no sample is lost."""
    run(Deaths(seed=17, count=8, kills_guardians=kills_guardians), tmp_path, say=print)


def test_no_stranger_is_signalled_or_named() -> None:
    """Whatever workers, flags, surroundings and ends there are, and whatever a stranger has in common with the job."""
    run_jobs(range(12))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_warm_workers_end_after_a_start_and_two_restarts(launch: Callable[..., Launched]) -> None:
    """Jobs under --preload end with 0, whatever processes and threads their workers leave to the interpreter's end."""
    command = (sys.executable, "-m", "tests.chaos.preloaded")
    # The workers of this seed take all parts but the compiler's, which alone takes longer than the others together.
    job = launch("--starts", "1", "--restarts", "2", "--seed", "1", program=command, cwd=Path(__file__).parents[2])
    assert job.wait_exit(deadline=200) == 0, job.stdout
    assert "1 starts and 2 restarts" in job.stdout


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "store",
    [
        "file",
        *(pytest.param(store, marks=[pytest.mark.system, pytest.mark.soak]) for store in STORES if store != "file"),
    ],
)
def test_a_coordinator_that_stood_still_decides_nothing(store: str, tmp_path: Path) -> None:
    """Restarts are counted once each; a node that coordinated comes to the others' round."""
    reproduce(store, tmp_path)
