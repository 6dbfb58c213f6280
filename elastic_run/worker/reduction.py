"""Small agreements of all ranks: a mean, a yes or no.

A worker without a process group is a group of one only if no launcher placed it among others. Else it would take its
own value for everybody's, and a plain mistake would show as a model that learns badly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from elastic_run.worker.distributed import world_size
from elastic_run.worker.errors import WorkerError
from elastic_run.worker.leaving import keep_tensor

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["any_rank", "has_peers", "reduce_mean"]

#: Values of so many bytes and less are added up in float32.
_SUM_BYTES = 4


@overload
def reduce_mean(value: float, *, group: dist.ProcessGroup | None = None) -> float: ...


@overload
def reduce_mean(value: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor: ...


def reduce_mean(value: float | torch.Tensor, *, group: dist.ProcessGroup | None = None) -> float | torch.Tensor:
    """Return the mean of a value over all ranks; each rank calls it and gets the same.

    It is for figures to print or to decide by, such as a loss: no gradient flows through it.

    Args:
        value: A number, or a tensor of the same shape on every rank. It is left as it is.
        group: The ranks; None for all.

    Returns:
        A float for a number. A new tensor for a tensor, of the same type and device; whole numbers become float32.
        Types of 16 bits and less are added up in 32.

    Raises:
        WorkerError: There are other workers, but no process group yet; or this one is not in the group.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        device = _group_device(group) if has_peers(group) else "cpu"
        number = torch.tensor(float(value), dtype=torch.float64, device=device)
        keep_tensor(number)
        return float(_mean(number, group).item())
    result_type = value.dtype if value.is_floating_point() or value.is_complex() else torch.float32
    # Not promote_types: it refuses the types of 8 bits.
    sum_type = torch.complex64 if result_type.is_complex else torch.float32
    if result_type.itemsize > _SUM_BYTES:
        sum_type = result_type
    return _mean(value.detach().to(sum_type, copy=True), group).to(result_type)


def any_rank(answer: bool, *, group: dist.ProcessGroup | None = None) -> bool:
    """Return on every rank whether it was yes on any."""
    if not has_peers(group):
        return answer
    import torch
    import torch.distributed as dist

    vote = torch.tensor(float(answer), device=_group_device(group))
    keep_tensor(vote)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
    return bool(vote.item())


def has_peers(group: dist.ProcessGroup | None) -> bool:
    """Tell whether there is anybody to exchange with.

    Raises:
        WorkerError: There is, but no process group to do it in; or this worker is not in the group.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size(group)
        if size < 1:  # torch's value for ranks that are not in the group
            message = f"rank {dist.get_rank()} is not in this group, and can't ask its ranks"
            raise WorkerError(message)
        return size > 1
    if (workers := world_size()) > 1:
        message = f"this is one of {workers} workers, but there is no process group: call init_distributed() first"
        raise WorkerError(message)
    return False


def _mean(total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up in place; gloo knows no average, so it is divided here."""
    if not has_peers(group):
        return total
    import torch.distributed as dist

    dist.all_reduce(total, group=group)
    return total.div_(dist.get_world_size(group))


def _group_device(group: dist.ProcessGroup | None) -> torch.device | str:
    """Return where a tensor must be for this group: NCCL takes those of the current CUDA device only."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend(group) == "nccl":
        return "cuda"
    return "cpu"
