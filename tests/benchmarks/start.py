"""Start: from exec of the launcher to the first line of the last worker.

The clock starts before the launcher's `Popen`, and each worker says the same clock's time in its script's first line.
The floor starts the same scripts by a loop of `Popen`, without any launcher's interpreter before them. It gives each a
session of its own, as launchers do: Linux shares CPUs out by session, so that on a busy machine it matters.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import interleave
from tests.benchmarks.figures import Bar, Figure
from tests.benchmarks.job import BenchmarkError, Job
from tests.support.launch import clean_environment

if TYPE_CHECKING:
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

#: Starts within a turn, where one takes some dozens of milliseconds.
_TIMES = 5
_MANY = (32, 128)


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure 2 workers against torchrun and the floor, 32 and 128 against the floor."""
    start_workers(installation, "elastic-run", 2)  # the page cache is warm for all
    start_workers(installation, "torchrun", 2)
    few = interleave(
        {
            "elastic-run": lambda: start_workers(installation, "elastic-run", 2),
            "floor": lambda: start_bare(installation, 2),
            "torchrun": lambda: start_workers(installation, "torchrun", 2),
        },
        rounds=effort.pairs,
        times={"elastic-run": _TIMES, "floor": _TIMES},
    )
    name = "exec to the first line of the last of 2 workers"
    ours, torchrun, floor = (few.median(contender) for contender in ("elastic-run", "torchrun", "floor"))
    figures = [
        Figure(
            benchmark="start",
            name=name + suffix,
            unit="ms",
            bar=bar,
            elastic_run=ours,
            torchrun=torchrun,
            floor=floor,
            ratio=few.ratio("elastic-run", bar.of),
            is_headline=bar.of == "torchrun",
        )
        for suffix, bar in (("", Bar(0.08, "torchrun")), (", by the floor", Bar(3.5, "floor")))
    ]
    return figures + [_measure_many(installation, effort, nproc) for nproc in _MANY]


def _measure_many(installation: Installation, effort: Effort, nproc: int) -> Figure:
    many = interleave(
        {
            "elastic-run": lambda: start_workers(installation, "elastic-run", nproc),
            "floor": lambda: start_bare(installation, nproc),
        },
        rounds=effort.pairs,
    )
    return Figure(
        benchmark="start",
        name=f"exec to the first line of the last of {nproc} workers",
        unit="ms",
        bar=Bar(1.3, "floor"),
        elastic_run=many.median("elastic-run"),
        floor=many.median("floor"),
        ratio=many.ratio("elastic-run", "floor"),
    )


def start_workers(installation: Installation, launcher: str, nproc: int) -> float:
    """Start workers under a launcher, and return the milliseconds to the last one's first line."""
    command = installation.launcher(launcher, nproc, installation.worker("first_line"))
    with Job(command, directory=installation.directory) as job:
        lines = job.wait_lines(nproc)
        job.wait_end()
    return (max(int(words[0]) for words in lines) - job.started_at) / 1e6


def start_bare(installation: Installation, nproc: int) -> float:
    """Start workers by a loop, and return the milliseconds to the last one's first line."""
    command = [installation.python, "-u", installation.worker("first_line")]
    environment = clean_environment()
    reader, writer = os.pipe()
    started_at = time.monotonic_ns()
    workers = [subprocess.Popen(command, env=environment, stdout=writer, start_new_session=True) for _ in range(nproc)]
    os.close(writer)
    with os.fdopen(reader, encoding="ascii") as output:
        times = [int(line) for line in output]
    for worker in workers:
        worker.wait()
    if len(times) != nproc:
        message = f"{len(times)} of {nproc} workers spoke"
        raise BenchmarkError(message)
    return (max(times) - started_at) / 1e6
