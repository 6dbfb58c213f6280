"""How soon a worker's death is answered: its sibling told, the job's end, or the next attempt.

The worker says the time of its death itself, in its last system call but one. When a launcher has seen it can't be seen
from outside; what can be is the first thing it does then, the SIGTERM to the sibling, which says when that came. In the
other jobs siblings leave SIGTERM to the kernel.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure, compared, interleave
from benchmarks.job import Job
from tests.support.processes import is_gone, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.installation import Effort, Installation

#: Deaths within a turn of elastic-run.
_TIMES = 4
_FEW, _MANY = 2, 8
#: Seconds after the workers' first lines until a launcher has nothing left to do.
_SETTLING = 1.5


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure until the sibling is told, the end of a job of 2 and of 8, and the restart of one of 2."""
    told = f"death of one of {_FEW} workers to SIGTERM in the other worker"
    young = f"{told}, in a job that has just begun"
    restart = f"death of one of {_FEW} workers to the first line of the last restarted worker"
    return [
        _figure(told, 5.0, {"detection": "SIGTERM in the other worker"}, tell_after_death, installation, effort),
        _figure(young, None, {}, partial(tell_after_death, age=0.0), installation, effort),
        *(
            _figure(
                f"death of one of {nproc} workers to the end of the other workers and the launcher",
                50.0,
                {"detection": f"all {nproc} workers and the launcher gone"},
                partial(end_after_death, nproc=nproc),
                installation,
                effort,
            )
            for nproc in (_FEW, _MANY)
        ),
        _figure(restart, 80.0, {"restart": f"{_FEW} plain workers"}, restart_after_death, installation, effort),
    ]


def _figure(
    name: str,
    bar: float | None,
    plots: dict[str, str],
    measure_one: Callable[[Installation, str], float],
    installation: Installation,
    effort: Effort,
) -> Figure:
    deaths = interleave(
        {launcher: partial(measure_one, installation, launcher) for launcher in installation.launchers},
        rounds=effort.pairs,
        times={"elastic-run": _TIMES},
    )
    return compared(
        deaths,
        benchmark="detection",
        name=name,
        unit="ms",
        bar=None if bar is None else Bar(bar),
        note=f"worst of {effort.pairs * _TIMES}: {deaths.worst('elastic-run'):.0f} ms",
        plots=plots,
    )


def tell_after_death(installation: Installation, launcher: str, age: float = _SETTLING) -> float:
    """Let one worker of two die, and return the milliseconds until its sibling has SIGTERM."""
    command = installation.launcher(launcher, 2, installation.worker("fail_once"), "tell")
    with Job(command, directory=installation.directory) as job:
        job.wait_lines(2, starting="up 0")
        time.sleep(age)
        job.poke()
        told_at = int(job.wait_lines(1, starting="told")[0][1])
        died_at = int(job.wait_lines(1, starting="died")[0][1])
        job.wait_end(code=_code_of_failure(launcher))
    return (told_at - died_at) / 1e6


def _code_of_failure(launcher: str) -> int | None:
    """Return the exit code of a launcher whose job failed; ft_launcher's is 0 on one node, at times."""
    return None if launcher == "ft_launcher" else 1


def end_after_death(installation: Installation, launcher: str, nproc: int) -> float:
    """Let one worker die, and return the milliseconds until its siblings and the launcher are gone."""
    command = installation.launcher(launcher, nproc, installation.worker("fail_once"))
    with Job(command, directory=installation.directory) as job:
        pids = [int(words[2]) for words in job.wait_lines(nproc, starting="up 0")]
        job.poke()
        ended_at = job.wait_end(code=_code_of_failure(launcher))
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
