"""A worker on one of several nodes, each line with the nanoseconds of the host's clock.

``up NANOSECONDS GROUP_RANK WORLD_SIZE`` first. With the argument ``connect`` it comes late at random, connects to all
others at MASTER_ADDR:MASTER_PORT and says ``connected``, with the same words. When a byte arrives on stdin, the first
worker of the node says ``died`` and dies. ``told`` when a SIGTERM ends it.
"""

import os
import random
import signal
import sys
import time


def say(word: str) -> None:
    """Write a line in one piece."""
    group_rank, world_size = os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"]
    os.write(1, f"{word} {time.monotonic_ns()} {group_rank} {world_size}\n".encode())


def stop(*_: object) -> None:
    """Say that one was told, and go."""
    say("told")
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
say("up")
if sys.argv[1:] == ["connect"]:
    time.sleep(random.choice((0.0, 0.05, 0.1, 0.2, 0.5)))  # noqa: S311 - no secret

    from elastic_run.store.client import StoreClient

    size = int(os.environ["WORLD_SIZE"])
    store = StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60.0)
    store.set(f"came/{os.environ['RANK']}", "1")
    store.wait([f"came/{other}" for other in range(size)])
    if store.add("connected", 1) > size:
        sys.exit("this store is not a fresh one")
    say("connected")
if os.environ["LOCAL_RANK"] == "0" and os.read(0, 1):
    say("died")
    os._exit(1)
signal.pause()
