"""Looks at workers on a GPU from outside: their threads as the kernel sees them, and the driver's list of processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.launch import Launched

__all__ = ["describe_gpus", "describe_threads", "list_gpu_processes", "list_gpus", "wait_free", "workers_of"]

#: Seconds between two readings of a thread's processor time.
_INTERVAL = 0.5


def _open() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library or no driver
        return None
    return pynvml


def list_gpus() -> list[Any]:
    """Return the driver's handles of the GPUs; none without a driver."""
    library = _open()
    return [] if library is None else [library.nvmlDeviceGetHandleByIndex(0)]


def list_gpu_processes() -> dict[int, int]:
    """Return the bytes of GPU memory of each process."""
    library = _open()
    found = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByIndex(0))
    return {process.pid: process.usedGpuMemory for process in found}


def wait_free(pids: Sequence[int], seconds: float = 2.0) -> float:
    """Wait until no process of a list has GPU memory; return for how long that took."""
    began_at = time.monotonic()
    while set(list_gpu_processes()) & set(pids):
        assert time.monotonic() < began_at + seconds, f"{pids} hold GPU memory: {list_gpu_processes()}"
        time.sleep(0.01)
    return time.monotonic() - began_at


def workers_of(job: Launched) -> list[int]:
    """Return the pids of a job's Python workers in the order of their ranks."""
    found: dict[str, int] = {}
    for pid in _children(job.pid):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        ranks = [word.partition(b"=")[2].decode() for word in words if word.startswith(b"RANK=")]
        rank = title.partition("rank ")[2][:1] or (ranks[0] if ranks else "")
        if rank.isdecimal():
            found.setdefault(rank, pid)
    return [found[rank] for rank in sorted(found)]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def describe_threads(pids: Sequence[int]) -> str:
    """Return a line for each thread: its name, state, processor time in percent, and where it waits in the kernel."""
    before = {task: _read_cpu(task) for pid in pids for task in _tasks(pid)}
    time.sleep(_INTERVAL)
    lines = []
    for task, cpu in before.items():
        share = (_read_cpu(task) - cpu) / os.sysconf("SC_CLK_TCK") / _INTERVAL
        lines.append(f"{task} {_read(task, 'comm')} {_state(task)} {share:.0%} {_read(task, 'wchan')}")
    return "\n".join(lines)


def describe_gpus() -> str:
    """Return what the driver tells of the GPU and of each process on it."""
    library = _open()
    device = library.nvmlDeviceGetHandleByIndex(0)
    lines = [f"utilization {library.nvmlDeviceGetUtilizationRates(device).gpu}", f"memory {list_gpu_processes()}"]
    for since in (0, int((time.time() - 1) * 1e6)):
        try:
            samples = library.nvmlDeviceGetProcessUtilization(device, since)
        except library.NVMLError as error:
            lines.append(f"since {since}: {error}")
        else:
            found = [(one.pid, one.smUtil, round(one.timeStamp / 1e6 - time.time(), 2)) for one in samples]
            lines.append(f"since {since}: pid, smUtil, seconds {found}")
    return "\n".join(lines)


def _tasks(pid: int) -> list[str]:
    try:
        return [str(task) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _read(task: str, name: str) -> str:
    try:
        return Path(task, name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


def _state(task: str) -> str:
    return _read(task, "stat").rpartition(") ")[2][:1]


def _read_cpu(task: str) -> int:
    words = _read(task, "stat").rpartition(") ")[2].split()
    return int(words[11]) + int(words[12]) if len(words) > 12 else 0
