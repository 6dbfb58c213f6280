"""Functions as workers: launch one from a program, and get what each worker returned.

    python examples/functions.py

The launch is below `if __name__ == "__main__":` because a worker imports this file to find the function. elastic_launch
gives workers ranks, a meeting place and restarts; spawn only runs a function in several processes.
"""

from __future__ import annotations

import os
import sys

import elastic_run
from elastic_run import ChildFailedError, LaunchConfig, elastic_launch


def train(rate: float) -> tuple[int, float]:
    """Return this worker's rank and what it found; the first attempt of rank 1 fails."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 and attempt == 0:
        message = "the first attempt is always bad"
        raise RuntimeError(message)
    return rank, rate * 2**attempt


def greet(index: int, name: str) -> None:
    """Say hello, and which process this is."""
    sys.stdout.write(f"process {index} says hello to {name}\n")


def main() -> None:
    """Launch both."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="local", max_restarts=1)
    for rank, value in elastic_launch(config, train)(0.5).items():
        print(f"rank {rank} returned {value}")
    config.max_restarts = 0
    try:
        elastic_launch(config, train)(0.5)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"without restarts: rank {rank}: {failure.message['message']}", flush=True)
    elastic_run.spawn(greet, ("the world",), nprocs=2)


if __name__ == "__main__":
    main()
