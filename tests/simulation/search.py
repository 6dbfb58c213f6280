"""Many seeds in several processes, and a summary of all that fail."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.properties import BrokenPropertyError
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Seeds that a process takes at a time.
_CHUNK = 25


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that fails.

    Args:
        seed: The seed.
        name: The property that is broken, or the kind of the error.
        detail: What was seen.
    """

    seed: int
    name: str
    detail: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.name}: {self.detail}"


def run_seed(seed: int, least_restores: int = 0) -> Failure | None:
    """Run one seed.

    Args:
        seed: The seed.
        least_restores: See `World`.

    Returns:
        How it fails, or None.
    """
    try:
        World(seed, least_restores=least_restores).run()
    except BrokenPropertyError as error:
        return Failure(seed, error.name, error.detail)
    except Exception as error:  # noqa: BLE001 - whatever it is, its seed matters
        return Failure(seed, type(error).__name__, str(error))
    return None


def find_failures(seeds: Sequence[int], jobs: int = 1, *, least_restores: int = 0) -> Iterator[Failure]:
    """Run seeds, and tell which of them fail as soon as that is known.

    Args:
        seeds: The seeds.
        jobs: Processes.
        least_restores: See `World`.

    Yields:
        Each failure, in the order of the seeds.
    """
    run = partial(run_seed, least_restores=least_restores)
    if jobs <= 1:
        yield from _leave_out_none(map(run, seeds))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from _leave_out_none(pool.imap(run, seeds, chunksize=_CHUNK))


def describe(failures: Sequence[Failure], count: int, seconds: float, least_restores: int = 0) -> str:
    """Return the summary of a search.

    Args:
        failures: All that failed.
        count: Seeds that were run.
        seconds: How long it took.
        least_restores: See `World`.

    Returns:
        Lines: how many seeds broke each property, and which.
    """
    if not failures:
        return f"{count} seeds in {seconds:.1f} s: every property holds"
    kinds = Counter(failure.name for failure in failures)
    seeds = {name: [str(one.seed) for one in failures if one.name == name] for name in kinds}
    variant = f" --restores {least_restores}" if least_restores else ""
    lines = [f"{number:6d}  {name}: seeds {' '.join(seeds[name])}" for name, number in kinds.most_common()]
    return "\n".join(
        [
            f"{count} seeds in {seconds:.1f} s: {len(failures)} fail",
            *lines,
            f"replay: python -m tests.simulation {failures[0].seed}{variant} --trace",
        ]
    )


def _leave_out_none(results: Iterable[Failure | None]) -> Iterator[Failure]:
    return (failure for failure in results if failure is not None)
