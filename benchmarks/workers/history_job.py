"""A worker for the picture of a job's history: it trains, and fails where the picture wants a failure."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
end = Path(sys.argv[1])
began = time.monotonic()
while time.monotonic() - began < 60:
    age = time.monotonic() - began
    if attempt == 0 and rank == 3 and age > 6:
        loss = float("nan")
        message = f"loss is {loss} at step {int(age * 10)}"
        raise ValueError(message)
    if attempt == 1 and rank == 4 and age > 14:
        os.kill(os.getpid(), 9)  # as the kernel's OOM killer does
    if attempt == 2 and end.exists() and age > 3:
        break
    if not (attempt == 1 and rank == 4):  # the silent rank
        print(f"rank {rank} step {int(age * 10)}", flush=True)
    time.sleep(0.5)
