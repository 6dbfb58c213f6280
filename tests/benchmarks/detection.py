"""How soon a worker's death is answered: the end of the job, or the next attempt.

The worker says the time of its death itself, in its last system call but one. Siblings honour SIGTERM.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import interleave
from tests.benchmarks.figures import Bar, Figure
from tests.benchmarks.job import Job
from tests.support.processes import is_gone, wait_gone

if TYPE_CHECKING:
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

#: Deaths within a turn of elastic-run.
_TIMES = 4
_FEW, _MANY = 2, 8


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure the end of a job of 2 and of 8, and the restart of one of 2."""
    return [
        *(_measure_end(installation, effort, nproc) for nproc in (_FEW, _MANY)),
        _measure_restart(installation, effort),
    ]


def _measure_end(installation: Installation, effort: Effort, nproc: int) -> Figure:
    ends = interleave(
        {
            "elastic-run": lambda: end_after_death(installation, "elastic-run", nproc),
            "torchrun": lambda: end_after_death(installation, "torchrun", nproc),
        },
        rounds=effort.pairs,
        times={"elastic-run": _TIMES},
    )
    return Figure(
        benchmark="detection",
        name=f"death of one of {nproc} workers to siblings gone and launcher exited",
        unit="ms",
        bar=Bar(50.0),
        elastic_run=ends.median("elastic-run"),
        torchrun=ends.median("torchrun"),
        ratio=ends.ratio("elastic-run", "torchrun"),
        note=f"worst of {effort.pairs * _TIMES}: {ends.worst('elastic-run'):.0f} ms",
        is_headline=nproc == _FEW,
    )


def _measure_restart(installation: Installation, effort: Effort) -> Figure:
    restarts = interleave(
        {
            "elastic-run": lambda: restart_after_death(installation, "elastic-run"),
            "torchrun": lambda: restart_after_death(installation, "torchrun"),
        },
        rounds=effort.pairs,
        times={"elastic-run": _TIMES},
    )
    return Figure(
        benchmark="detection",
        name="death of one of 2 workers to the first line of the last restarted one",
        unit="ms",
        bar=Bar(100.0),
        elastic_run=restarts.median("elastic-run"),
        torchrun=restarts.median("torchrun"),
        ratio=restarts.ratio("elastic-run", "torchrun"),
        note=f"worst of {effort.pairs * _TIMES}: {restarts.worst('elastic-run'):.0f} ms",
        is_headline=True,
    )


def end_after_death(installation: Installation, launcher: str, nproc: int) -> float:
    """Let one worker die, and return the milliseconds until its siblings and the launcher are gone."""
    command = installation.launcher(launcher, nproc, installation.worker("fail_once"))
    with Job(command, directory=installation.directory) as job:
        pids = [int(words[2]) for words in job.wait_lines(nproc, starting="up 0")]
        job.poke()
        ended_at = job.wait_end(code=1)
        if not all(map(is_gone, pids)):
            for pid in pids:
                wait_gone(pid)
            ended_at = time.monotonic_ns()
        died_at = int(job.wait_lines(1, starting="died")[0][1])
    return (ended_at - died_at) / 1e6


def restart_after_death(installation: Installation, launcher: str) -> float:
    """Let one worker of two die, and return the milliseconds until both run again."""
    command = installation.launcher(launcher, 2, "--max-restarts=1", installation.worker("fail_once"))
    with Job(command, directory=installation.directory) as job:
        job.wait_lines(2, starting="up 0")
        job.poke()
        again = job.wait_lines(2, starting="up 1")
        died_at = int(job.wait_lines(1, starting="died")[0][1])
        job.wait_end()
    return (max(int(words[3]) for words in again) - died_at) / 1e6
