"""Rank 0 of the first attempt dies when a byte arrives on stdin; the others sleep. A later attempt ends at once.

Lines: ``up ATTEMPT PID NANOSECONDS`` from each, ``died NANOSECONDS`` from the one that dies. With the argument ``tell``
the others say ``told NANOSECONDS`` when SIGTERM comes, and end.
"""

import os
import signal
import sys
import time


def tell(*_: object) -> None:
    """Say when one was told, and go."""
    os.write(1, b"told %d\n" % time.monotonic_ns())
    os._exit(0)


if sys.argv[1:] == ["tell"]:
    signal.signal(signal.SIGTERM, tell)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, b"up %d %d %d\n" % (attempt, os.getpid(), time.monotonic_ns()))
if attempt == 0:
    if os.environ["RANK"] == "0":
        os.read(0, 1)
        os.write(1, b"died %d\n" % time.monotonic_ns())
        os._exit(1)
    signal.pause()
