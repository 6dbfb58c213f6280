"""Train normally under --hang-timeout, and fail at the first hang that is reported.

    python -m tests.chaos.normal                                          2 minutes with a timeout of 10 s
    python -m tests.chaos.normal --minutes 60 --hang-timeout 60 auto      two jobs beside each other, an hour each

The training has all pauses of a real one (`normal_training`), most of them longer than the timeout. No fault is
injected, so each hang that is reported is a false one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_TRAINING = Path(__file__).with_name("normal_training.py")
_WORKERS = 2
#: The scale of the pauses under `auto`: its shortest timeout is five minutes.
_AUTO_SCALE = 300.0
#: Seconds beyond the training's own time for its last phase, in hang timeouts, and for a start on a loaded machine.
_LAST_PHASE = 6.0
_MARGIN = 300.0


def say(line: str) -> None:
    """Print a line at once."""
    print(f"normal: {line}", flush=True)  # noqa: T201 - a command prints


def start(timeout: str, *, seconds: float, seed: int, output: Path) -> subprocess.Popen[bytes]:
    """Start one job, whose output goes into a file."""
    scale = _AUTO_SCALE if timeout == "auto" else float(timeout)
    with output.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic_run", "--standalone", f"--nproc-per-node={_WORKERS}", "--max-restarts=0",
             f"--hang-timeout={timeout}", "--hang-action=fail", _TRAINING, str(seconds), str(scale)],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "SEED": str(seed)},
        )  # fmt: skip


def main() -> int:
    """Run the jobs; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.normal")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--hang-timeout", nargs="+", default=["10"], help="a job for each, in seconds, or auto")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60
    failed = 0
    with tempfile.TemporaryDirectory(prefix="normal-") as top:
        outputs = [Path(top, f"{number}.txt") for number in range(len(arguments.hang_timeout))]
        jobs = [
            start(timeout, seconds=seconds, seed=arguments.seed + number, output=output)
            for number, (timeout, output) in enumerate(zip(arguments.hang_timeout, outputs, strict=True))
        ]
        for timeout, job, output in zip(arguments.hang_timeout, jobs, outputs, strict=True):
            code = job.wait(seconds + _LAST_PHASE * _AUTO_SCALE + _MARGIN)
            text = output.read_text(errors="replace")
            if code or "hangs" in text:
                failed += 1
                say(f"--hang-timeout={timeout} FAILED with {code}:\n{text[-4000:]}")
            else:
                say(f"--hang-timeout={timeout}: no hang in {arguments.minutes:g} minutes, {text.splitlines()[-1]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
