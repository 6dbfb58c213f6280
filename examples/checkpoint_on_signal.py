"""A signal that asks for a checkpoint and stops nothing.

    elastic-run --standalone --nproc-per-node=2 --forward-signals=SIGUSR1 examples/checkpoint_on_signal.py DIRECTORY
    kill -USR1 <pid of elastic-run>

Schedulers warn before they take the machine (Slurm: --signal=B:USR1@120). With --forward-signals the warning reaches
every worker, and the job goes on; without it, every worker that has a handler by then.
"""

import os
import signal
import sys
import threading
from pathlib import Path

rank = os.environ["RANK"]
checkpoint = Path(sys.argv[1]) / f"rank{rank}.txt"
is_asked = threading.Event()
signal.signal(signal.SIGUSR1, lambda _number, _frame: is_asked.set())

# One write per line, so that the lines of two workers can't mix.
sys.stdout.write(f"rank {rank} trains\n")
sys.stdout.flush()
is_asked.wait()  # stands for the steps of a training; it looks between two of them
checkpoint.write_text(f"rank {rank} was here\n")
sys.stdout.write(f"rank {rank} saved {checkpoint.name} and goes on\n")
