"""Workers connect at MASTER_ADDR:MASTER_PORT: a thousand starts in a row, and restarts with one rank late.

Beside it a process keeps taking and releasing ports, as other programs on a machine do. No start may fail.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.figures import counted
from benchmarks.job import BenchmarkError, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

_WORKERS = 4
#: Seconds for one restart, the late rank's included.
_RESTART_DEADLINE = 5.0


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Count what failed."""
    with busy_ports(installation):
        begun = time.monotonic()
        failures = [failure_of_start(installation) for _ in range(effort.starts)]
        each = (time.monotonic() - begun) / effort.starts
        are_connected, why_not = _try_restarts(installation, effort.restarts)
    return [
        counted(
            [why != "" for why in failures],
            benchmark="worker_connections",
            name=f"failures in {effort.starts} starts of {_WORKERS} workers that connect, "
            "while another program takes ports",
            note=f"{1000 * each:.0f} ms each, from exec to exit"
            + "".join(f"; {why}" for why in [*filter(None, failures)][:1]),
        ),
        counted(
            [not is_connected for is_connected in are_connected],
            benchmark="worker_connections",
            name=f"failures in {effort.restarts} restarts with one of {_WORKERS} ranks late",
            note=why_not,
        ),
    ]


def _try_restarts(installation: Installation, restarts: int) -> tuple[list[bool], str]:
    """Return in which rounds all workers connected, and the reason if the job failed."""
    try:
        return connected_rounds(installation, restarts), ""
    except BenchmarkError as error:
        return [False] * (restarts + 1), " ".join(str(error).split())


def failure_of_start(installation: Installation) -> str:
    """Run a job whose workers connect and end; return what went wrong, or nothing."""
    command = installation.launcher("elastic-run", _WORKERS, installation.worker("connect"))
    try:
        with Job(command, directory=installation.directory) as job:
            job.wait_end()
            job.wait_lines(_WORKERS, starting="connected 0")
    except BenchmarkError as error:
        return " ".join(str(error).split())
    return ""


def connected_rounds(installation: Installation, restarts: int) -> list[bool]:
    """Run one job that restarts so often, and return for each of its rounds whether all workers connected."""
    options = (f"--max-restarts={restarts}", "--max-backoff=0")
    command = installation.launcher("elastic-run", _WORKERS, *options, installation.worker("connect"), str(restarts))
    with Job(command, directory=installation.directory) as job:
        job.wait_end(deadline=_RESTART_DEADLINE * (restarts + 1))
        # In all rounds but the last, rank 0 fails once all ranks have connected, and the others may be stopped before
        # they write their line.
        expected = [1] * restarts + [_WORKERS]
        return [job.lines.count(f"connected {attempt}") >= least for attempt, least in enumerate(expected)]


@contextlib.contextmanager
def busy_ports(installation: Installation) -> Iterator[None]:
    """Have another program take and release ports meanwhile."""
    command = [installation.python, "-u", installation.worker("port_taker")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
        if taker.stdin is None or taker.stdout is None:
            message = "the port taker has no pipes"
            raise BenchmarkError(message)
        taker.stdout.readline()
        try:
            yield
        finally:
            taker.stdin.close()
