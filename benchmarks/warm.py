"""The first collective: workers that import torch, join over gloo and all-reduce; at launch, and after a death.

This is what a user waits for, the workers' imports included. `--preload torch` makes a contender of its own: there
workers are forked from a process that has torch. Each turn is one job: launched, its memory looked at, a worker killed,
followed until the next generation has reduced.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, compare, compared, take_turns
from benchmarks.job import Job
from benchmarks.memory import proportional_megabytes
from tests.support.processes import descendants_of

if TYPE_CHECKING:
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

#: torchrun's store, and so ft_launcher's, lives through a restart with the dead generation's addresses in it; gloo's
#: next one connects to these where a worker reads one before it is set anew, and fails. So both are told to have rank
#: 0's worker serve a store of its own.
_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: The contender that has torch before its workers start.
PRELOAD = "elastic-run --preload torch"
_WORKERS = 8
#: What the README calls the figures that a user would measure, by what is measured and the contender.
_HEADLINES = {
    ("launch", "elastic-run"): f"{_WORKERS} workers that import torch: from the command to their first gloo all-reduce",
    ("restart", "elastic-run"): "the same job: from a worker's death to the next all-reduce of all workers",
    ("launch", PRELOAD): "the same start with `--preload=torch`, beside torchrun, which has no such flag",
    ("restart", PRELOAD): "the same restart with `--preload=torch`",
}
#: Seconds for all workers to have reduced.
_DEADLINE = 120.0


@dataclass(frozen=True)
class Training:
    """One job.

    Args:
        launch: Milliseconds from exec to the last worker's all-reduce.
        restart: Milliseconds from a worker's death to the next generation's last all-reduce.
        workers: Megabytes of the workers, shared pages by share.
        job: Megabytes of all processes of the job.
    """

    launch: float
    restart: float
    workers: float
    job: float


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Let all launchers take turns, with and without torch preloaded."""
    contenders = (PRELOAD, *installation.launchers)
    train(installation, contenders[0], 2)  # the page cache is warm for all
    trainings = take_turns({name: partial(train, installation, name) for name in contenders}, rounds=effort.pairs)
    launch, restart = "exec to the all-reduce of the last of", "death of a worker to the next all-reduce of the last of"
    return [
        *_pair(trainings, "launch", launch, (Bar(0.9, "torchrun"), Bar(0.25, "torchrun"))),
        *_pair(trainings, "restart", restart, (Bar(1.0, "torchrun"), Bar(0.03, "torchrun"))),
        *_pair(trainings, "workers", "memory (PSS) of", (None, Bar(0.5, "torchrun"))),
        *_pair(trainings, "job", "memory (PSS) of the launcher's processes and", (None, None)),
    ]


def _pair(
    trainings: dict[str, list[list[Training]]], measured: str, what: str, bars: tuple[Bar | None, Bar | None]
) -> list[Figure]:
    """Return two figures of one thing: as it is, and with torch preloaded."""
    is_time = measured in {"launch", "restart"}
    comparison = compare(trainings, attrgetter(measured))
    return [
        compared(
            comparison,
            benchmark="warm",
            name=f"{what} {_WORKERS} workers that import torch{suffix}",
            unit="ms" if is_time else "MB",
            bar=bar,
            ours=ours,
            headline=_HEADLINES.get((measured, ours), ""),
            plots=_plots(measured),
        )
        for ours, suffix, bar in (("elastic-run", "", bars[0]), (PRELOAD, ", --preload torch", bars[1]))
    ]


def _plots(measured: str) -> dict[str, str]:
    """Return where a figure is drawn; with and without preloading it has the same place."""
    workers = f"{_WORKERS} workers that import torch"
    return {
        "launch": {"first_collective": workers},
        "restart": {"restart": workers},
        "workers": {"footprint": workers},
        "job": {"footprint": f"launcher and {workers}"},
    }[measured]


def train(installation: Installation, contender: str, nproc: int = _WORKERS) -> Training:
    """Run a job until its second generation has reduced."""
    launcher, _, options = contender.partition(" ")
    command = installation.launcher(
        launcher, nproc, *options.split(), "--max-restarts=1", installation.worker("all_reduce")
    )
    environment = {} if launcher == "elastic-run" else _FRESH_STORE
    with Job(command, directory=installation.directory, env=environment) as job:
        first = job.wait_lines(nproc, starting="reduced 0", deadline=_DEADLINE)
        pids = {int(words[2]): int(words[3]) for words in first}
        workers, everything = _megabytes(list(pids.values())), _megabytes([job.pid, *descendants_of(job.pid)])
        killed_at = time.monotonic_ns()
        os.kill(pids[nproc - 1], signal.SIGKILL)
        second = job.wait_lines(nproc, starting="reduced 1", deadline=_DEADLINE)
        job.send(signal.SIGTERM)
        job.wait_end(code=None)
    launched_at, restarted_at = (max(int(words[4]) for words in lines) for lines in (first, second))
    return Training(
        launch=(launched_at - job.started_at) / 1e6,
        restart=(restarted_at - killed_at) / 1e6,
        workers=workers,
        job=everything,
    )


def _megabytes(pids: list[int]) -> float:
    return sum(map(proportional_megabytes, pids))
