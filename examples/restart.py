"""Restart and resume without any framework: a worker fails twice, and each life goes on where the last one stopped.

    elastic-run --standalone --max-restarts=3 examples/restart.py progress.json

elastic-run starts the workers again after a failure, all of them, up to --max-restarts times. What was reached must be
on disk by then: that is the script's part.
"""

import json
import os
import sys
from pathlib import Path

progress = Path(sys.argv[1])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # 0 in the first life
step = json.loads(progress.read_text())["step"] if progress.exists() else 0
print(f"life {restart} begins at step {step}")

while step < 9:
    step += 1
    partial = progress.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step}))
    partial.replace(progress)  # whole or not at all: never half a file, whenever the worker dies
    if step in (3, 6):
        message = f"an accident at step {step}"
        raise RuntimeError(message)
print(f"done at step {step}, after {restart} restarts")
