"""The hang detection over simulated time: no normal training is a hang, and a hang is found in each."""

from __future__ import annotations

import pytest

from tests.simulation.training import Training

HOUR = 3600.0


def _train(hours: int, *, timeout: float, first_seed: int) -> int:
    """Let many jobs train for some hours in all; return how often the detector looked."""
    looks = 0
    for seed in range(first_seed, first_seed + hours // 50):
        job = Training(seed, timeout, tick=30.0)
        job.run(50 * HOUR)
        assert job.verdicts == [], f"seed {seed}"
        looks += job.looks
    return looks


@pytest.mark.parametrize("timeout", [300.0, 0.0], ids=["300", "auto"])
def test_a_normal_training_is_no_hang(timeout: float) -> None:
    """Evaluation, checkpoints, compilation, loading and waits for data are none, in 100 hours."""
    assert _train(100, timeout=timeout, first_seed=0) > 0


@pytest.mark.soak
@pytest.mark.parametrize("timeout", [300.0, 0.0], ids=["300", "auto"])
def test_a_normal_training_is_no_hang_for_years(timeout: float) -> None:
    """The same over 10,000 hours."""
    assert _train(10_000, timeout=timeout, first_seed=1000) > 0


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed > 2)) for seed in range(20)])
@pytest.mark.parametrize(("kind", "delay"), [("hang", 300.0), ("loop", 3000.0)])
def test_a_hang_is_found_in_each_of_these_jobs(kind: str, delay: float, seed: int) -> None:
    """Rank 0 is stuck, and the others wait: the verdict comes after the timeout, and after ten if its loader loops."""
    job = Training(seed, 300.0, tick=1.0)
    job.run(HOUR)
    job.play("train", 100.0)
    began = job.now
    job.play(kind, delay + 100.0)
    ((found, phase),) = job.verdicts
    assert phase == kind
    assert delay <= found - began <= delay + 8
