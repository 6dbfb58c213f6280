"""Deadlines in a program that launches functions.

    python examples/timer_functions.py

The worker that overruns its deadline is killed, and no other; what `elastic_launch` raises names the scope.
"""

import os
import threading

from elastic_run import LaunchConfig, elastic_launch, timer
from elastic_run.multiprocessing.errors import ChildFailedError


def train() -> str:
    """Make two steps, the second of which hangs at rank 1."""
    with timer.expires(after=60, scope="first step"):
        pass
    with timer.expires(after=1, scope="second step"):
        if os.environ["RANK"] == "1":
            threading.Event().wait()
    return "done"


if __name__ == "__main__":
    os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="timers",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, train)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank}: {str(failure.message).partition(';')[0]}")
