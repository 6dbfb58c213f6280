"""A deadline for each training step: a worker that hangs is killed, and the job goes on with the next attempt.

    TORCHELASTIC_ENABLE_FILE_TIMER=1 elastic-run --standalone --nproc-per-node=2 --max-restarts=1 examples/timer.py

The deadline is kept from outside, by elastic-run: it also holds while the worker hangs in native code or in a
collective, where no Python of its own could run. The report names the scope.
"""

import os
import sys
import threading

from elastic_run import timer

rank = os.environ["RANK"]
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]

for step in range(3):
    with timer.expires(after=2, scope=f"step {step}"):
        if (rank, step, restart) == ("1", 1, "0"):
            threading.Event().wait()  # an accident: it never returns
# One write, so that no other rank gets between the words.
sys.stdout.write(f"rank {rank} has made 3 steps, after {restart} restarts\n")
