"""How much of the GPUs each process takes, as NVIDIA's management library tells it (nvidia-ml-py, extra `gpu`)."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["GpuUse", "has_library", "read_gpu_use"]


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one process takes of all GPUs of this machine.

    Args:
        busy: Percent of the time in which its GPUs computed, for any process; the mean of several GPUs.
        memory: Bytes, or None where the driver does not tell.
    """

    busy: float | None
    memory: int | None


def has_library() -> bool:
    """Whether nvidia-ml-py is installed; it is not imported."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where somebody asks

    return find_spec("pynvml") is not None


def read_gpu_use() -> dict[int, GpuUse]:
    """Return what each process takes, by pid in this machine's first namespace; empty where the library tells nothing.

    A driver that is ill may hold the caller up for long.
    """
    import pynvml  # noqa: PLC0415 - an extra

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
        _end(pynvml)
    return {pid: _add(uses) for pid, uses in found.items()}


def _end(pynvml: Any) -> None:  # noqa: ANN401 - a module without types
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass


def _read_device(pynvml: Any, index: int) -> list[tuple[int, GpuUse]]:  # noqa: ANN401 - ditto
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return []  # this GPU was lost
    try:
        busy = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except pynvml.NVMLError:
        busy = None  # a part of a GPU (MIG) has no such figure
    return [(process.pid, GpuUse(busy, process.usedGpuMemory)) for process in processes]


def _add(uses: list[GpuUse]) -> GpuUse:
    busy = [use.busy for use in uses if use.busy is not None]
    memory = [use.memory for use in uses if use.memory is not None]
    return GpuUse(sum(busy) / len(busy) if busy else None, sum(memory) if memory else None)
