"""Run a training job through random faults, from the command line.

    python -m tests.chaos                          30 faults, a seed of the moment
    python -m tests.chaos --seed 17 --faults 40    the same faults again
    python -m tests.chaos --only kill-agent,go-dark --store c10d
    python -m tests.chaos --every 2 --longest 4 --faults 100 --store successors    faults that overlap

The last line says whether the job did all it must; a failure is preceded by what every agent wrote, and by the command
that repeats it. Needs root (virtual hosts).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import FAULTS, LONGEST
from tests.chaos.story import STORES, Story, tell


def say(line: str) -> None:
    """Tell the one who waits."""
    print(f"chaos: {line}", flush=True)  # noqa: T201 - a command prints


def main() -> int:
    """Run one story and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--faults", type=int, default=30, help="how many")
    parser.add_argument("--store", choices=STORES, default="etcd-v3")
    parser.add_argument("--only", default="", help=f"kinds of faults, of {','.join(FAULTS)}")
    parser.add_argument("--every", type=float, default=None, help="seconds from fault to fault, which then overlap")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds that a fault lasts at most")
    parser.add_argument("--keep", type=Path, default=None, help="leave books, logs and transcripts here")
    arguments = parser.parse_args()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed  # noqa: S311 - no secret
    only = tuple(name for name in arguments.only.split(",") if name)
    story = Story(
        seed,
        count=arguments.faults,
        store=arguments.store,
        only=only,
        every=arguments.every,
        longest=arguments.longest,
    )
    start = time.monotonic()
    say(story.command())
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        try:
            tell(story, arguments.keep or Path(directory), say=say)
        except AssertionError as error:
            say(f"{error}")
            say(f"FAILED after {time.monotonic() - start:.0f} s; again: {story.command()}")
            return 1
    say(f"{arguments.faults} faults in {time.monotonic() - start:.0f} s: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
