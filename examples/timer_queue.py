"""Deadlines in a program that launches functions: workers and server share a multiprocessing queue.

    python examples/timer_queue.py

The worker that overruns its deadline is killed, and no other; what `elastic_launch` raises names the scope.
"""

import multiprocessing
import os
import threading
from typing import Any

from elastic_run import LaunchConfig, elastic_launch, timer
from elastic_run.multiprocessing.errors import ChildFailedError


def train(requests: Any) -> str:
    """Make two steps, the second of which hangs at rank 1."""
    timer.configure(timer.LocalTimerClient(requests))
    with timer.expires(after=60, scope="first step"):
        pass
    with timer.expires(after=1, scope="second step"):
        if os.environ["RANK"] == "1":
            threading.Event().wait()
    return "done"


if __name__ == "__main__":
    requests = multiprocessing.get_context("spawn").Queue()
    server = timer.LocalTimerServer(requests, max_interval=0.01)
    server.start()  # returns at once
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
        elastic_launch(config, train)(requests)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank}: {str(failure.message).partition(';')[0]}")
    server.stop()
