"""Ten thousand jobs in virtual time, none of which may break a promise."""

from __future__ import annotations

import pytest

from tests.simulation.world import World

SEEDS = 10_000
#: Seeds of one test: a failure is reported before all have run.
CHUNK = 1_000


@pytest.mark.timeout(600)  # seconds; all chunks together take some two minutes of one processor
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_job_breaks_a_promise(first: int) -> None:
    """Ranks, membership, budget, verdict and progress hold under every drawn fault."""
    for seed in range(first, first + CHUNK):
        try:
            World(seed).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, its seed matters
            pytest.fail(f"{type(error).__name__}: {error}\nreplay: python -m tests.simulation {seed} --trace")


def test_a_seed_is_the_same_run_each_time() -> None:
    """A failing seed can be replayed: nothing but the seed decides what happens."""
    runs = []
    for _ in range(2):
        lines: list[str] = []
        World(12, lines.append).run()
        runs.append(lines)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20
