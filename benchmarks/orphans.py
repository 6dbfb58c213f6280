"""SIGKILL to the launcher: two seconds later nothing that it started lives, grandchildren included.

Each of two workers has a child in its own session, one in a session of that child's own, and a descendant that has left
session and parent. By turns elastic-run's guardian is left alone, killed with the launcher, and stopped
before it.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from functools import partial
from itertools import chain, cycle
from math import inf
from statistics import mean
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure, alone, interleave
from benchmarks.job import Job
from tests.support.processes import (
    TEST_TOKEN,
    descendants_of,
    is_gone,
    kill_processes,
    processes_with_environment,
    wait_guardians,
)

if TYPE_CHECKING:
    from benchmarks.figures import Comparison
    from benchmarks.installation import Effort, Installation

#: Seconds in which all has to be gone.
_LIMIT = 2.0
_LOOK = 0.002
#: What elastic-run's guardian gets right before the launcher is killed, kill after kill.
_TO_GUARDIAN = (None, signal.SIGKILL, signal.SIGSTOP)


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Kill launchers in turn, and count after how many something lived on."""
    signals = cycle(_TO_GUARDIAN)
    kills = interleave(
        {
            "elastic-run": lambda: seconds_to_empty(installation, "elastic-run", to_guardian=next(signals)),
            "torchrun": partial(seconds_to_empty, installation, "torchrun"),
        },
        rounds=effort.pairs,
        times={"elastic-run": max(1, effort.kills // effort.pairs)},
    )
    return [_survival_figure(kills), *_time_figures(kills)]


def _survival_figure(kills: Comparison) -> Figure:
    left = {
        name: [[100.0 * (seconds == inf) for seconds in turn] for turn in turns] for name, turns in kills.rounds.items()
    }
    shares = {name: mean(share for turn in turns for share in turn) for name, turns in left.items()}
    return Figure(
        benchmark="orphans",
        name=f"SIGKILLs of the launcher after which a process still lived {_LIMIT:g} s later",
        unit="%",
        bar=Bar(0.0),
        elastic_run=shares["elastic-run"],
        torchrun=shares["torchrun"],
        values=left,
        headline="trials in which `kill -9` of the launcher left processes behind",
    )


def _time_figures(kills: Comparison) -> list[Figure]:
    """Return the time until nothing was left with the guardian left alone; no figure where something always was."""
    alone_killed = list(chain.from_iterable(kills.rounds["elastic-run"]))[:: len(_TO_GUARDIAN)]
    gone = [1000 * seconds for seconds in alone_killed if seconds < inf]
    name = "SIGKILL of the launcher to the end of its last process"
    note = f"worst {max(gone, default=inf):.0f} ms"
    return [alone(gone, benchmark="orphans", name=name, unit="ms", bar=None, note=note)] if gone else []


def seconds_to_empty(
    installation: Installation, launcher: str, *, to_guardian: signal.Signals | None = None, limit: float = _LIMIT
) -> float:
    """Kill a launcher, and see what is left of it."""
    token = uuid.uuid4().hex
    command = installation.launcher(launcher, 2, installation.worker("parent"))
    with Job(command, directory=installation.directory, env={TEST_TOKEN: token}) as job:
        pids = [int(word) for words in job.wait_lines(2) for word in words]
        guardians = [] if to_guardian is None else wait_guardians(job.pid)
        pids += descendants_of(job.pid)
        killed_at = time.monotonic()
        if to_guardian is not None:
            os.kill(guardians[0], to_guardian)
        os.kill(job.pid, signal.SIGKILL)
        while (is_left := not all(map(is_gone, pids))) and time.monotonic() < killed_at + limit:
            time.sleep(_LOOK)
        seconds = time.monotonic() - killed_at
        # A guardian that was being started in another's place is in no list from before.
        while (left := processes_with_environment(token)) and time.monotonic() < killed_at + limit:
            time.sleep(_LOOK)
            seconds = time.monotonic() - killed_at
        kill_processes([*left, *(pid for pid in pids if not is_gone(pid))])
    return inf if is_left or left else seconds
