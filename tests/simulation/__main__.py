"""Replay one seed, `python -m tests.simulation SEED [--trace]`, or search many, `--count 10000 [--from 0]`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.world import World


def run(first: int, count: int) -> int:
    """Run seeds until one fails.

    Args:
        first: The first seed.
        count: How many.

    Returns:
        The exit code.
    """
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            World(seed).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, its seed matters
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            sys.stdout.write(f"replay: python -m tests.simulation {seed} --trace\n")
            return 1
    sys.stdout.write(f"{count} seeds in {time.monotonic() - started:.1f} s\n")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    if options.seed is None:
        return run(options.first, options.count)
    World(options.seed, _print if options.trace else None).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
