"""What the workers have used and written so far, for `elastic-run status`, the event log and the lines about stacks."""

from __future__ import annotations

import os
import time

from elastic_run.multiprocessing.output.worker_output import last_line
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.devices import GpuUse
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.loop import Loop

#: Bytes of a log file in which its last line is looked for.
_READ = 512
#: Seconds for the GPUs' driver.
_GPU_WAIT = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker's process has used: seconds of processor time, resident bytes now, its state in psutil's words."""

    cpu: float
    memory: int
    state: str


def read_usage(current: Round) -> dict[int, Usage]:
    """Return what the workers that run have used, by local rank; their children are not in it."""
    pids = current.workers.pids
    found = {rank: read_process(pids[rank]) for rank in sorted(current.workers.alive)}
    return {rank: usage for rank, usage in found.items() if usage is not None}


def read_process(pid: int) -> Usage | None:
    """Return what one process has used, or None where that can't be read."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return Usage(cpu.user + cpu.system, process.memory_info().rss, process.status())
    except (psutil.Error, OSError):
        return None  # it has ended, or no file can be opened


def ask_gpu_use(loop: Loop, memory: dict[str, Any], deliver: Callable[[dict[int, GpuUse]], None]) -> None:
    """Give the GPU use by pid to a function, in the loop; nothing where nvidia-ml-py is missing, or does not answer.

    A thread asks: a driver that hangs holds up its caller, but not the loop. While an earlier question of this `memory`
    still waits for the driver, no other one is asked.
    """
    import threading

    from elastic_run.cluster import devices

    earlier = memory.get("gpu")
    if not devices.has_library() or (earlier is not None and earlier.is_alive()):
        deliver({})
        return
    waiting = [deliver]

    def conclude(found: dict[int, GpuUse]) -> None:
        if waiting:
            timer.cancel()
            waiting.pop()(found)

    def read() -> None:
        found = devices.read_gpu_use()
        loop.call_soon_threadsafe(lambda: conclude(found))

    timer = loop.call_later(_GPU_WAIT, lambda: conclude({}))
    memory["gpu"] = threading.Thread(target=read, name="gpu use", daemon=True)
    memory["gpu"].start()


def add_silences(dumps: dict[int, Dump], current: Round, now: float) -> dict[int, Dump]:
    """Return the stacks of some workers by global rank with the seconds since the last output of each."""
    local_ranks = {rank: local_rank for local_rank, rank in current.global_ranks.items()}
    return {
        rank: replace(dump, silence=find_output(current, local_ranks[rank], now)[0]) for rank, dump in dumps.items()
    }


def find_output(current: Round, local_rank: int, now: float) -> tuple[float | None, str]:
    """Return seconds since a worker's last output, None where not all of its output is seen here; and its last line."""
    activity = current.output.activities.get(local_rank)
    latest, line = (current.started, "") if activity is None else (activity.last, activity.last_line)
    for path in current.output_files(local_rank):
        try:
            status = os.stat(path)
            # Both of these clocks are this machine's own, and the difference is for display.
            written = now - (time.time() - status.st_mtime)
            if status.st_size and (written > latest or not line):
                latest, line = max(latest, written), last_line(_read_end(path, status.st_size))
        except OSError:
            continue  # removed by somebody
    return (max(0.0, now - latest) if current.sees_stdout(local_rank) else None), line


def _read_end(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, _READ, max(0, size - _READ))
    finally:
        os.close(fd)
