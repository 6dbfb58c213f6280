"""Replay one seed, `python -m tests.simulation SEED [--trace]`, or search many, `--from 0 --count 10000 --jobs 2`.

With `--restores N` at least N of the faults of every run restore the store from a snapshot, and no store moves.
The same seed is another run without it.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.search import describe, find_failures
from tests.simulation.world import World


def search(first: int, count: int, jobs: int, least_restores: int) -> int:
    """Run seeds, and print each that fails, then a summary.

    Args:
        first: The first seed.
        count: How many.
        jobs: Processes.
        least_restores: See `World`.

    Returns:
        The exit code.
    """
    started = time.monotonic()
    failures = []
    for failure in find_failures(range(first, first + count), jobs, least_restores=least_restores):
        failures.append(failure)
        _print(str(failure))
    _print(describe(failures, count, time.monotonic() - started, least_restores))
    return 1 if failures else 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--restores", type=int, default=0, help="restores of the store in each run, at least")
    options = parser.parse_args()
    if options.seed is None:
        return search(options.first, options.count, options.jobs, options.restores)
    World(options.seed, _print if options.trace else None, least_restores=options.restores).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
