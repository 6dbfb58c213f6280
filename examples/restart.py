"""Restart and resume without any framework: the worker fails twice, and each time it resumes from its last step.

    elastic-run --standalone --max-restarts=3 examples/restart.py progress.json

After a failure elastic-run starts all workers again, up to --max-restarts times. The script itself saves its progress
in a file, and reads this file when it starts. Delete the file to run the example again.
"""

import json
import os
import sys
from pathlib import Path

progress = Path(sys.argv[1])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # 0 before the first restart
step = json.loads(progress.read_text())["step"] if progress.exists() else 0
print(f"attempt {restart} begins at step {step}")

while step < 9:
    step += 1
    partial = progress.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step}))
    partial.replace(progress)  # a worker that dies now leaves the old file or the new file
    if step in (3, 6):
        message = f"a failure on purpose at step {step}"
        raise RuntimeError(message)
print(f"done at step {step}, after {restart} restarts")
