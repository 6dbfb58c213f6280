"""SIGKILL to the launcher: two seconds later nothing that it started lives, grandchildren included.

Each of two workers has a child in its own session and one in a session of that child's own.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from functools import partial
from math import inf
from statistics import mean
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import interleave
from tests.benchmarks.figures import Bar, Figure, alone
from tests.benchmarks.job import Job
from tests.support.processes import TEST_TOKEN, descendants_of, is_gone, kill_processes, processes_with_environment

if TYPE_CHECKING:
    from tests.benchmarks.comparison import Comparison
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

#: Seconds in which all has to be gone.
_LIMIT = 2.0
_LOOK = 0.002


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Kill launchers in turn, and count after how many something lived on."""
    kills = interleave(
        {name: partial(seconds_to_empty, installation, name) for name in ("elastic-run", "torchrun")},
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
        name=f"SIGKILLs of the launcher after which something lived {_LIMIT:g} s later",
        unit="%",
        bar=Bar(0.0),
        elastic_run=shares["elastic-run"],
        torchrun=shares["torchrun"],
        values=left,
        is_headline=True,
    )


def _time_figures(kills: Comparison) -> list[Figure]:
    """Return the time until nothing was left; no figure where something always was."""
    gone = [1000 * seconds for turn in kills.rounds["elastic-run"] for seconds in turn if seconds < inf]
    name = "SIGKILL of the launcher to the last of its processes gone"
    note = f"worst {max(gone, default=inf):.0f} ms"
    return [alone(gone, benchmark="orphans", name=name, unit="ms", bar=None, note=note)] if gone else []


def seconds_to_empty(installation: Installation, launcher: str) -> float:
    """Kill a launcher, and return the seconds until nothing of it was left; infinity when something was."""
    token = uuid.uuid4().hex
    command = installation.launcher(launcher, 2, installation.worker("parent"))
    with Job(command, directory=installation.directory, env={TEST_TOKEN: token}) as job:
        pids = [int(word) for words in job.wait_lines(2) for word in words]
        pids += descendants_of(job.pid)
        killed_at = time.monotonic()
        os.kill(job.pid, signal.SIGKILL)
        while (is_left := not all(map(is_gone, pids))) and time.monotonic() < killed_at + _LIMIT:
            time.sleep(_LOOK)
        seconds = time.monotonic() - killed_at
        left = processes_with_environment(token)
        kill_processes(left)
    return inf if is_left or left else seconds
