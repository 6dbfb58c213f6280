"""SIGKILL to the launcher: two seconds later nothing that it started lives, grandchildren included.

Each of two workers has a child in its own session and one in a session of that child's own.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from statistics import median
from typing import TYPE_CHECKING

from tests.benchmarks.figures import Bar, Figure
from tests.benchmarks.job import Job
from tests.support.processes import TEST_TOKEN, descendants_of, is_gone, kill_processes, processes_with_environment

if TYPE_CHECKING:
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

#: Seconds in which all has to be gone.
_LIMIT = 2.0
#: torchrun's answer never varies, and each of its turns takes the whole limit.
_TORCHRUN_KILLS = 3
_LOOK = 0.002


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Kill launchers, and count after how many something lived on."""
    times = [seconds_to_empty(installation, "elastic-run") for _ in range(effort.kills)]
    torchrun = [seconds_to_empty(installation, "torchrun") for _ in range(_TORCHRUN_KILLS)]
    left = torchrun.count(None)
    done = [kill for kill in times if kill is not None]
    return [
        Figure(
            benchmark="orphans",
            name=f"SIGKILLs of the launcher after which something lived {_LIMIT:g} s later",
            unit="%",
            bar=Bar(0.0),
            elastic_run=100 * times.count(None) / len(times),
            torchrun=100 * left / len(torchrun),
            note=f"elastic-run {times.count(None)} of {len(times)}, torchrun {left} of {len(torchrun)}",
            is_headline=True,
        ),
        Figure(
            benchmark="orphans",
            name="SIGKILL of the launcher to the last of its processes gone",
            unit="ms",
            bar=None,
            elastic_run=1000 * median(done) if done else float("inf"),
            note=f"worst {1000 * max(done, default=float('inf')):.0f} ms",
        ),
    ]


def seconds_to_empty(installation: Installation, launcher: str) -> float | None:
    """Kill a launcher, and return the seconds until nothing of it was left; None when something was."""
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
    return None if is_left or left else seconds
