"""Start and restart warm workers many times, with everything that programs do with processes and threads.

    python -m tests.chaos.preloaded                             20 starts and a job of 20 restarts
    python -m tests.chaos.preloaded --starts 500 --restarts 500 --busy 2

A job that does not end within its deadline fails the command, which shows its processes and its output and kills it.
`--busy` keeps so many processors busy beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.processes import descendants_of, describe

_TRAINING = Path(__file__).with_name("preloaded_training.py")
_WORKERS = 2
#: Seconds for a start; a restart gets half of it. A machine that is shared may need ten times what an idle one does.
_DEADLINE = 240.0


def say(line: str) -> None:
    """Print a line at once."""
    print(f"preloaded: {line}", flush=True)  # noqa: T201 - a command prints


class UnendedError(Exception):
    """A job did not end, or did not end well; the text has all that is known."""


def run_job(directory: Path, *, seed: int, restarts: int) -> None:
    """Run one job under --preload to its end.

    Args:
        directory: An empty directory for what the workers write and for the compiler's cache (`directory.parent`).
        seed: Which parts the workers run.
        restarts: How often the workers fail before they succeed.

    Raises:
        UnendedError: the job ended with another code than 0, was still there at its deadline, or lost an `atexit`.
    """
    output = directory / "output.txt"
    with output.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, "-m", "elastic_run", "--standalone", f"--nproc-per-node={_WORKERS}", "--preload=torch",
             f"--max-restarts={restarts}", "--shutdown-timeout=20", _TRAINING, directory, str(restarts)],
            stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "PART_SEED": str(seed), "TORCHINDUCTOR_CACHE_DIR": str(directory.parent / "compiled")},
        )  # fmt: skip
        try:
            code = job.wait(_DEADLINE * (1 + restarts / 2))
        except subprocess.TimeoutExpired as error:
            seen = _describe(job.pid)
            _kill(job)
            message = f"did not end:\n{seen}\n{_tail(output)}"
            raise UnendedError(message) from error
    missing = [rank for rank in range(_WORKERS) if not (directory / f"done.{restarts}.{rank}").exists()]
    if code or missing:
        message = f"ended with {code}, without the atexit of ranks {missing}:\n{_tail(output)}"
        raise UnendedError(message)


def _describe(pid: int) -> str:
    return "\n".join(f"{known}: {describe(known)}" for known in (pid, *descendants_of(pid)))


def _kill(job: subprocess.Popen[bytes]) -> None:
    job.kill()  # the guardian ends what belongs to it
    job.wait()


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-4000:]


def _burn() -> None:
    while True:
        pass


def main() -> int:
    """Run the starts and the restarts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.preloaded")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0, help="processors to keep busy")
    parser.add_argument("--seed", type=int, default=0, help="of the first start")
    arguments = parser.parse_args()
    busy = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="preloaded-") as top:
        try:
            for start in range(arguments.starts):
                directory = Path(top, f"start{start}")
                directory.mkdir()
                run_job(directory, seed=arguments.seed + start, restarts=0)
                if start % 25 == 24:
                    say(f"{start + 1} starts in {time.monotonic() - begin:.0f} s")
            directory = Path(top, "restarts")
            directory.mkdir()
            if arguments.restarts:
                run_job(directory, seed=arguments.seed, restarts=arguments.restarts)
        except UnendedError as error:
            say(f"FAILED: {error}")
            return 1
    say(f"{arguments.starts} starts and {arguments.restarts} restarts in {time.monotonic() - begin:.0f} s: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
