"""Kept state: what a lost worker or node costs a training, and how long a save and a restore hold it up.

The training saves in each step: with elastic-run into the launcher's memory, with torchrun through
torch.distributed.checkpoint into /dev/shm and to a disk. What is measured is the time from a SIGKILL to the end of the
next optimizer step of all ranks. A save and a restore stand beside a plain copy of the same bytes, in one process.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Comparison, alone, compared, interleave
from benchmarks.job import BenchmarkError, Job
from benchmarks.warm import _FRESH_STORE as FRESH_STORE
from tests.support.local_rendezvous import wait_coordinated
from tests.support.processes import descendants_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

_MEGABYTES = 48
_SIZES = (512, 4096)
_DEADLINE = 120.0
#: Seconds of silence after which a node is lost, and of a node's loss to the next step at most.
_LEASE, _AFTER = 3.0, 3.0


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Let the launchers take turns, then lose nodes, then copy."""
    figures = _lose_workers(installation, effort)
    lost = [_lose_node(installation) for _ in range(4 * effort.pairs)]
    figures.append(
        alone(
            lost,
            summary=max,
            benchmark="state",
            name="SIGKILL of one of two nodes to the next step of a spare and the other, with one copy: slowest",
            unit="s",
            bar=Bar(_LEASE + _AFTER),
        )
    )
    for megabytes in _SIZES:
        figures += _copy(installation, megabytes, effort.pairs)
    return figures


def _lose_workers(installation: Installation, effort: Effort) -> list[Figure]:
    """Kill a worker of two."""

    def lose(launcher: str, how: str, *options: str) -> float:
        directory = mkdtemp(dir="/dev/shm" if how == "shm" else installation.directory)
        words = (installation.worker("train_state"), f"{_MEGABYTES}", "kept" if how == "kept" else directory)
        command = installation.launcher(launcher, 2, "--max-restarts=1", *options, *words)
        try:
            with Job(command, directory=installation.directory, env=None if options else FRESH_STORE) as job:
                job.wait_lines(10, starting="stepped 0", deadline=_DEADLINE)
                pids = {int(words[2]): int(words[3]) for words in job.wait_lines(2, starting="stepped 0")}
                killed_at = time.monotonic_ns()
                os.kill(pids[1], signal.SIGKILL)
                return (_wait_all(job, "1", 2) - killed_at) / 1e9
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def kept() -> float:
        return lose("elastic-run", "kept", "--preload=torch", "--keep-state=512MB")

    figures = []
    for how, where in (("shm", "/dev/shm"), ("disk", "a disk")):
        contenders: dict[str, Callable[[], float]] = {"elastic-run": kept, "torchrun": partial(lose, "torchrun", how)}
        comparison = interleave(contenders, rounds=effort.pairs)
        figures.append(
            compared(
                comparison,
                benchmark="state",
                name=f"SIGKILL of a worker to the next step of both, {_MEGABYTES} MB kept in each; torchrun: {where}",
                unit="s",
                bar=Bar(1.5) if how == "shm" else None,
                headline="SIGKILL of a worker to the next training step of all, with `--keep-state --preload=torch`; "
                "torchrun: with checkpoints in /dev/shm"
                if how == "shm"
                else "",
            )
        )
    return figures


def _lose_node(installation: Installation) -> float:
    """Kill a node of two with a spare; return the seconds to the next step of all ranks."""
    with socket.socket() as free, ExitStack() as ends:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        conf = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt={_LEASE:.0f}"
        flags = (
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *("--rdzv-id=state", f"--rdzv-conf={conf}", "--max-restarts=1", "--preload=torch", "--keep-state=512MB"),
            *("--keep-state-copies=1", installation.worker("train_state"), f"{_MEGABYTES}", "kept"),
        )

        def start() -> Job:
            command = [*installation.elastic_run, *flags]
            return ends.enter_context(Job(command, directory=installation.directory, env=None))

        first = start()
        wait_coordinated(port, run_id="state")  # the job would end with the node that serves its store
        second = start()
        first.wait_lines(5, starting="stepped 0", deadline=_DEADLINE)
        spare = start()
        end = time.monotonic() + _DEADLINE
        while "spare" not in spare.errors or not _is_warm(spare.pid):  # as after some seconds of waiting
            if time.monotonic() > end:
                message = f"the third node is no spare with a warm worker: {spare.errors}"
                raise BenchmarkError(message)
            time.sleep(0.05)
            second.read()  # else its worker waits for the pipe
            first.read()
        before = max(int(line.split()[4]) for line in first.lines if line.startswith("stepped"))
        killed_at = second.send(signal.SIGKILL)
        stepped = spare.wait_lines(1, starting="stepped", deadline=_DEADLINE)[0]
        again = int(stepped[4])
        if again < before - 1:
            message = f"a spare went on with step {again} after step {before}"
            raise BenchmarkError(message)
        return (int(stepped[5]) - killed_at) / 1e9


def _is_warm(launcher: int) -> bool:
    """Whether a worker of a launcher has imported its modules, and waits for its program."""
    titles = [Path(f"/proc/{pid}/cmdline") for pid in descendants_of(launcher)]
    with suppress(FileNotFoundError, ProcessLookupError):
        return any(title.read_bytes().startswith(b"elastic-run: waiting") for title in titles)
    return False


def _copy(installation: Installation, megabytes: int, times: int) -> list[Figure]:
    """Keep and restore a state in one worker."""
    room = f"--keep-state={megabytes * 9 // 4}MiB"
    command = installation.launcher(
        "elastic-run", 1, room, installation.worker("copy_state"), f"{megabytes}", f"{times}"
    )
    with Job(command, directory=installation.directory) as job:
        job.wait_end(deadline=_DEADLINE * 3)
        figures = []
        for what, limit in (("save", 1.3), ("restore", 1.5)):
            pairs = [tuple(map(float, line.split()[1:])) for line in job.lines if line.startswith(what)]
            comparison = Comparison(
                {"elastic-run": [[1e3 * ours] for ours, _ in pairs], "floor": [[1e3 * bare] for _, bare in pairs]}
            )
            figures.append(
                compared(
                    comparison,
                    benchmark="state",
                    name=f"{what} of {megabytes} MiB in one worker; floor: a plain copy of the bytes",
                    unit="ms",
                    bar=Bar(limit, "floor"),
                )
            )
    return figures


def _wait_all(job: Job, restart: str, workers: int) -> int:
    """Return when the last of the workers has ended its first step of a life."""
    end = time.monotonic() + _DEADLINE
    count = workers
    while time.monotonic() < end:
        lines = job.wait_lines(count, starting=f"stepped {restart}", deadline=_DEADLINE)
        first: dict[str, int] = {}
        for words in lines:
            first.setdefault(words[2], int(words[5]))
        if len(first) == workers:
            return max(first.values())
        count = len(lines) + 1
    message = "not all workers have stepped"
    raise BenchmarkError(message)
