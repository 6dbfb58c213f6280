"""Train with `train.py` on two workers, kill one of them, and check that the training resumes.

    make demo

This program sends SIGKILL to one worker. Then elastic-run must restart both workers, the workers must resume from the
checkpoint, and the loss must end lower than it began. If all of this happens, the last line says so, and the exit code
is 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
#: The worker is killed when this step is reported: after some checkpoints, well before the end.
KILL_AT = 60
#: Seconds that all of it may take.
TIME_LIMIT = 300


def run_job(checkpoint: Path) -> tuple[list[str], int]:
    """Run the job, kill rank 1 on the way, and return its lines and its exit code."""
    launcher = [sys.executable, "-m", "elastic_run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    script = [str(HERE / "train.py"), f"--checkpoint={checkpoint}"]
    job = subprocess.Popen([*launcher, *script], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    watchdog = threading.Timer(TIME_LIMIT, job.terminate)  # a demo that hangs fails
    watchdog.start()
    lines: list[str] = []
    victim = 0
    for line in job.stdout:
        print(f"  {line}", end="", flush=True)
        lines.append(line)
        if match := re.match(r"restart 0: the workers are \[\d+, (\d+)\]", line):
            victim = int(match[1])
        if line.startswith(f"step {KILL_AT}:") and victim:
            print(f"demo: killing rank 1 (pid {victim})", flush=True)
            os.kill(victim, signal.SIGKILL)
            victim = 0
    watchdog.cancel()
    return lines, job.wait()


def judge(lines: list[str], exit_code: int) -> tuple[str, bool]:
    """Return the line that says what happened, and whether all of it is as it must be."""
    text = "".join(lines)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", text, re.MULTILINE)] or [0.0]
    restarts = len(re.findall(r"^restart [1-9]\d*:", text, re.MULTILINE))
    resumed = [int(step) for step in re.findall(r"^resumed at step (\d+)", text, re.MULTILINE)]
    is_good = exit_code == 0 and restarts == 1 and len(resumed) == 1 and losses[-1] < 0.7 * losses[0]
    where = f"resumed at step {resumed[-1]}" if resumed else "not resumed"
    summary = f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {restarts} restart{'s' * (restarts != 1)}, {where}"
    return (f"{summary}: ok" if is_good else f"{summary}, exit code {exit_code}: FAILED"), is_good


def main() -> int:
    """Run the demo and return its exit code."""
    print("demo: training on 2 workers; one of them will be killed", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        lines, exit_code = run_job(Path(directory) / "model.pt")
    summary, is_good = judge(lines, exit_code)
    print(f"demo: {summary}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
