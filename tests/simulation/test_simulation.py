"""Twenty thousand jobs in virtual time, none of which may break a property."""

from __future__ import annotations

import pytest

from tests.simulation.properties import ASSIGNMENTS, KNOWN_BROKEN, BrokenPropertyError, require
from tests.simulation.search import Failure, describe, find_failures
from tests.simulation.world import World

SEEDS = 20_000
#: Seeds of one test: a failure is reported before all have run.
CHUNK = 500
#: Seeds beyond these are drawn where time is: `make test-long`, and CI.
SHORT = 500
#: Seeds in each of which the store is restored at least three times.
RESTORED = 500
_CHUNKS = [pytest.param(first, marks=[pytest.mark.long] * (first >= SHORT)) for first in range(0, SEEDS, CHUNK)]


@pytest.mark.timeout(600)  # seconds; all chunks together take some five minutes of one processor
@pytest.mark.parametrize("first", _CHUNKS)
def test_no_job_breaks_a_property(first: int) -> None:
    """Every property holds under every drawn fault; a failure names all seeds of the chunk that break one."""
    failures = [*find_failures(range(first, first + CHUNK))]
    assert not failures, "\n".join([*map(str, failures), describe(failures, CHUNK, 0.0)])


def test_the_summary_lists_all_failing_seeds() -> None:
    """Seeds are listed under the property that they break, and the first can be replayed."""
    failures = [Failure(3, "one", "x"), Failure(5, "two", "y"), Failure(9, "one", "z")]
    text = describe(failures, 10, 1.0)
    assert "3 fail" in text
    assert "2  one: seeds 3 9" in text
    assert "1  two: seeds 5" in text
    assert "replay: python -m tests.simulation 3 --trace" in text


def test_a_broken_property_has_its_name() -> None:
    """The error says which property is broken; one that is known to be broken raises none."""
    with pytest.raises(BrokenPropertyError, match="fit together: rank 1 twice") as caught:
        require(holds=False, name=ASSIGNMENTS, detail="rank 1 twice")
    assert caught.value.name == ASSIGNMENTS
    for name in KNOWN_BROKEN:
        require(holds=False, name=name, detail="is known")


@pytest.mark.long
def test_a_variant_restores_the_store_in_each_run() -> None:
    """With `least_restores` no property breaks either, and the summary's command replays that variant."""
    failures = [*find_failures(range(RESTORED), least_restores=3)]
    assert not failures, "\n".join([*map(str, failures), describe(failures, RESTORED, 0.0, 3)])
    assert "replay: python -m tests.simulation 3 --restores 3 --trace" in describe([Failure(3, "one", "x")], 1, 0.0, 3)


def test_a_seed_is_the_same_run_each_time() -> None:
    """A failing seed can be replayed: nothing but the seed decides what happens."""
    runs = []
    for _ in range(2):
        lines: list[str] = []
        World(12, lines.append).run()
        runs.append(lines)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20
