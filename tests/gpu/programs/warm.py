"""Computes on the GPU; in the first attempt rank 1 dies. Says how the worker was started."""

from __future__ import annotations

import os
import signal
import sys
import time

from meeting import RANK, join, say

ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]
say(f"rank {RANK} attempt {ATTEMPT} is {'warm' if 'torch' in sys.modules else 'cold'}")
began_at = time.monotonic()
join()
say(f"rank {RANK} attempt {ATTEMPT} joined after {time.monotonic() - began_at:.2f} s")
if ATTEMPT == "0":
    if RANK == 1:
        say(f"killed at {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
else:
    say(f"restarted at {time.monotonic()}")
