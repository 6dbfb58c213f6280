"""Which processes hold GPU memory, by nvidia-smi, and how much each process takes, by nvidia-ml-py (extra `gpu`)."""

from __future__ import annotations

import time
from contextlib import suppress

from elastic_run import contract
from elastic_run.cluster.paths import find_program
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader")

#: Seconds before now in which a process has computed or has not. The driver takes a sample at least once a second.
_WINDOW = 2.0


def find_query(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the command that lists the processes with GPU memory, or None if workers use no such GPU."""
    if environ.get(contract.ENV_CUDA_VISIBLE_DEVICES) in ("", "-1"):
        return None
    program = find_program("nvidia-smi", environ)
    return None if program is None else (program, *_QUERY)


def read_pids(output: str) -> frozenset[int]:
    """Return the pids that the command has listed; a line that is no number is a message."""
    lines = (line.strip() for line in output.splitlines())
    return frozenset(int(line) for line in lines if line.isdecimal())


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one process takes of all GPUs of this machine.

    Args:
        busy: Percent of the time in which its GPUs computed, for any process; the mean of several GPUs.
        memory: Bytes, or None where the driver does not tell.
        computes: Whether a GPU has computed for it lately; if the driver does not tell, whether its GPUs have computed
            for any process.
    """

    busy: float | None
    memory: int | None
    computes: bool


def has_library() -> bool:
    """Whether nvidia-ml-py is installed; it is not imported."""
    from importlib.util import find_spec

    return find_spec("pynvml") is not None


def read_gpu_use() -> dict[int, GpuUse]:
    """Return what each process takes, by pid in this machine's first namespace; empty where the library tells nothing.

    A driver that is ill may hold the caller up for long.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}  # no driver, or no GPU
    found: dict[int, list[GpuUse]] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            for pid, use in _read_device(pynvml, index):
                found.setdefault(pid, []).append(use)
    except pynvml.NVMLError:
        pass  # what was read counts
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return {pid: _add(uses) for pid, uses in found.items()}


def _read_device(pynvml: Any, index: int) -> list[tuple[int, GpuUse]]:
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return []  # this GPU was lost
    try:
        busy = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except pynvml.NVMLError:
        busy = None  # a part of a GPU (MIG) has no such figure
    computing = _find_computing(pynvml, device)
    return [
        (
            process.pid,
            GpuUse(busy, process.usedGpuMemory, computes=bool(busy) if computing is None else process.pid in computing),
        )
        for process in processes
    ]


def _find_computing(pynvml: Any, device: Any) -> frozenset[int] | None:
    """Return the processes for which a GPU has computed lately, or None where the driver doesn't tell (MIG, WSL)."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(device, int((time.time() - _WINDOW) * 1e6))
    except pynvml.NVMLError_NotFound:
        return frozenset()  # the driver tells, and no process has used the GPU
    except pynvml.NVMLError:
        return None
    return frozenset(each.pid for each in samples if each.smUtil or each.memUtil or each.encUtil or each.decUtil)


def _add(uses: list[GpuUse]) -> GpuUse:
    busy = [use.busy for use in uses if use.busy is not None]
    memory = [use.memory for use in uses if use.memory is not None]
    computes = any(use.computes for use in uses)
    return GpuUse(sum(busy) / len(busy) if busy else None, sum(memory) if memory else None, computes)
