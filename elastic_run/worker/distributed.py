"""One way into the process group, however the worker was started; and a description of this worker.

A process has one default group, as torch has it. So what is kept here, the group this module made, is the process's
too; it is the one thing that this package remembers between calls.
"""

from __future__ import annotations

import atexit
import datetime as dt
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_run.worker.place import Choice, Place, WorkerError, choose_device, find_place

if TYPE_CHECKING:
    import torch

    from elastic_run.worker.joining import RankBarrier

__all__ = ["WorkerContext", "init_distributed", "is_main", "local_rank", "rank", "world_size"]

_DEFAULT_TIMEOUT = dt.timedelta(minutes=10)
#: What limits the devices that a process sees.
_DEVICE_LIMITS = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_PER_TASK")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker is among the others.

    Attributes:
        rank: Among all workers.
        world_size: How many workers there are.
        local_rank: Among those on this node.
        local_world_size: How many workers there are on this node.
        device: Where to put the model and the data; with CUDA it is the current device already.
        backend: Of the process group.
        launcher: Its launcher: "elastic-run", "torchrun", "slurm", "environment" (RANK set otherwise), "none".
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str

    @property
    def is_main(self) -> bool:
        """Whether this is the one worker that prints and writes for all."""
        return self.rank == 0


class _Joined:
    """The group that `init_distributed` has made in this process."""

    def __init__(self) -> None:
        self.context: WorkerContext | None = None
        self.barrier: RankBarrier | None = None
        self.pid = 0
        self.count = 0


_joined = _Joined()


def init_distributed(
    backend: str | None = None,
    *,
    timeout: float | dt.timedelta | None = None,
    device: str | torch.device | None = None,
) -> WorkerContext:
    """Join the other workers: make the default process group, bind the device, prove that all can be reached.

    It does the same under elastic-run, torchrun, ``srun python`` and in plain python, where it makes a group of one. A
    second call changes nothing and returns the same. The group is destroyed when the process ends. Under Slurm the
    variables that a launcher would have set (RANK and so on) are set in `os.environ`, for libraries that look there.

    Args:
        backend: torch's name for it; None for nccl where there is a CUDA device, gloo elsewhere.
        timeout: How long each step of joining may take, and each collective later; in seconds if a number. None for
            10 minutes.
        device: Where this worker computes; None for the CUDA device of its local rank, or the CPU.

    Returns:
        What this worker is.

    Raises:
        PlaceError: The environment doesn't say which worker this is, or there is no device for it.
        JoinError: Not all workers came together; it names the missing ranks.
        ValueError: The timeout isn't positive, backend and device don't fit, or the group that is there already has
            another backend.
        WorkerError: This build of torch has no distributed package.
    """
    if _has_group():
        return _existing_context(backend)
    limit = _parse_timeout(timeout)
    place = find_place()
    import torch.distributed as dist

    if not dist.is_available():
        message = "this build of torch has no torch.distributed"
        raise WorkerError(message)
    import torch

    choice = choose_device(
        backend,
        None if device is None else str(device),
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        is_each_its_own=any(name in os.environ for name in _DEVICE_LIMITS),
    )
    return _join(place, choice, limit)


def rank() -> int:
    """Return this worker's rank among all: of its process group, or before there is one of its environment."""
    return _from_group("get_rank") if _has_group() else find_place().rank


def world_size() -> int:
    """Return how many workers there are, by the process group, or before there is one by the environment."""
    return _from_group("get_world_size") if _has_group() else find_place().world_size


def local_rank() -> int:
    """Return this worker's rank among those on its node."""
    return find_place().local_rank


def is_main() -> bool:
    """Tell whether this is the one worker that prints and writes for all, rank 0."""
    return rank() == 0


def _has_group() -> bool:
    module = sys.modules.get("torch.distributed")  # without the import there is no group
    return module is not None and module.is_available() and bool(module.is_initialized())


def _from_group(question: str) -> int:
    return int(getattr(sys.modules["torch.distributed"], question)())


def _parse_timeout(timeout: float | dt.timedelta | None) -> dt.timedelta:
    if timeout is None:
        return _DEFAULT_TIMEOUT
    limit = timeout if isinstance(timeout, dt.timedelta) else dt.timedelta(seconds=timeout)
    if limit <= dt.timedelta(0):
        message = f"timeout={timeout}: it must be more than 0 s"
        raise ValueError(message)
    return limit


def _join(place: Place, choice: Choice, limit: dt.timedelta) -> WorkerContext:
    import torch

    from elastic_run.worker.joining import join

    if place.launcher == "slurm":
        for name, value in place.variables.items():
            os.environ.setdefault(name, value)
    if choice.index is not None:
        torch.cuda.set_device(choice.index)
    _joined.barrier = join(place, choice, timeout=limit, generation=_joined.count)
    if not _joined.count:
        atexit.register(_leave)
    _joined.count += 1
    _joined.pid = os.getpid()
    _joined.context = WorkerContext(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=torch.device(choice.device),
        backend=choice.backend,
        launcher=place.launcher,
    )
    return _joined.context


def _existing_context(backend: str | None) -> WorkerContext:
    """Describe the group that is there: ours, or one that the script made by itself."""
    import torch
    import torch.distributed as dist

    actual = dist.get_backend()
    if backend is not None and backend != actual and (_joined.context is None or backend != _joined.context.backend):
        message = f"backend={backend}, but the process group is there already, with {actual}"
        raise ValueError(message)
    if _joined.context is not None:
        return _joined.context
    place = find_place()
    is_cuda = "nccl" in actual
    return WorkerContext(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
        backend=actual,
        launcher=place.launcher,
    )


def _leave() -> None:
    """Leave the group at the end of the process, and with it what torch would warn of, hang or crash by."""
    import torch.distributed as dist

    from elastic_run.worker.joining import destroy_groups, has_failed, keep_groups

    barrier, context = _joined.barrier, _joined.context
    if os.getpid() != _joined.pid or barrier is None or context is None:
        return  # a forked child: the group is its parent's
    is_failure = has_failed()
    if dist.is_initialized():
        if not is_failure:
            destroy_groups()
        elif "nccl" not in context.backend:  # NCCL's own destructor doesn't wait: it aborts
            keep_groups()
    if not is_failure:
        barrier.wait_leaving()
