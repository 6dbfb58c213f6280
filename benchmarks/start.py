"""Start: from exec of the launcher to the first line of the last worker.

The clock starts before the launcher's `Popen`, and each worker says the same clock's time in its script's first line.
The floor starts the same scripts by a loop of `Popen`, without any launcher's interpreter before them. It gives each a
session of its own, as launchers do: Linux shares CPUs out by session, so that on a busy machine it matters.
"""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, compared, interleave
from benchmarks.job import BenchmarkError, Job
from tests.support.launch import clean_environment

if TYPE_CHECKING:
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

#: Starts within a turn, where one takes some dozens of milliseconds.
_TIMES = 5
_FEW = 2
#: Numbers of workers, and what each may take by the floor: with the number of workers all grows as the floor does.
_MANY = {32: 1.3, 128: 1.1, 512: 1.1}
#: Workers that are started within a turn, about: their start differs from the floor's by less than from one time to the
#: next.
_STARTED = 384


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure few workers and many against torchrun and the floor."""
    for launcher in installation.launchers:
        start_workers(installation, launcher, _FEW)  # the page cache is warm for all
    return [_few_figure(installation, effort), *(_many_figure(installation, effort, nproc) for nproc in _MANY)]


def _few_figure(installation: Installation, effort: Effort) -> Figure:
    few = interleave(
        {
            **{name: partial(start_workers, installation, name, _FEW) for name in installation.launchers},
            "floor": partial(start_bare, installation, _FEW),
        },
        rounds=effort.pairs,
        times={"elastic-run": _TIMES, "floor": _TIMES},
    )
    return compared(
        few,
        benchmark="start",
        name=f"exec to the first line of the last of {_FEW} workers",
        unit="ms",
        bar=Bar(0.06, "torchrun"),
        headline=f"the launcher alone: from the command to the first line of {_FEW} workers that import nothing",
        plots={"start": f"{_FEW} workers"},
    )


def _many_figure(installation: Installation, effort: Effort, nproc: int) -> Figure:
    many = interleave(
        {
            "elastic-run": partial(start_workers, installation, "elastic-run", nproc),
            "floor": partial(start_bare, installation, nproc),
            "torchrun": partial(start_workers, installation, "torchrun", nproc),
        },
        rounds=effort.pairs,
        times=dict.fromkeys(("elastic-run", "floor"), max(2, _STARTED // nproc)),
    )
    return compared(
        many,
        benchmark="start",
        name=f"exec to the first line of the last of {nproc} workers",
        unit="ms",
        bar=Bar(_MANY[nproc], "floor"),
        plots={"start": f"{nproc} workers"},
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
