"""Small collectives for training scripts: a mean, a yes or no, and rows that each rank sends to each rank.

A worker without a process group is a group of one only if no launcher placed it among others. Else it would take its
own value for everybody's, and a plain mistake would show as a model that learns badly.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

from elastic_run.worker.distributed import world_size
from elastic_run.worker.joining import keep_tensor
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

__all__ = ["all_to_all", "any_rank", "has_peers", "reduce_mean"]

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
    """Tell whether there is anybody to exchange with; raise WorkerError if there is no way to."""
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


def all_to_all(
    rows: torch.Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send some rows of a tensor to each rank, and return those that came from each; gradients go the way back.

    Every rank of the group calls it, with tensors that differ in the number of rows only. torch.distributed's own stops
    the gradient, and gloo refuses some types (int16, float8): here rows go as bytes, which every backend can.

    Args:
        rows: Of shape (rows, …): first those for rank 0, then those for rank 1, and so on.
        input_splits: How many rows go to each rank; None for equally many.
        output_splits: How many rows come from each rank. None to find out, by one small exchange more if `input_splits`
            is given.
        group: The ranks; None for all.

    Returns:
        The rows of rank 0, then those of rank 1, and so on, of shape (sum of output_splits, …).

    Raises:
        ValueError: The splits don't fit the group or the tensor.
        WorkerError: There are other workers, but no process group yet; or this one is not in the group.
    """
    if rows.dim() == 0:
        message = "all_to_all sends rows: the tensor needs at least one dimension"
        raise ValueError(message)
    import torch.distributed as dist

    peers = dist.get_world_size(group) if has_peers(group) else 1
    sent = _check_splits("input_splits", input_splits, rows.shape[0], peers)
    if output_splits is not None:
        received = _check_splits("output_splits", output_splits, None, peers)
    else:
        received = sent if input_splits is None else _exchange_sizes(sent, rows.device, group)
    result: torch.Tensor = _exchange_type().apply(rows, sent, received, group)
    return result


def _check_splits(name: str, splits: Sequence[int] | None, count: int | None, peers: int) -> list[int]:
    if splits is None:
        if count is None or count % peers:
            message = f"{count} rows can't be shared out equally among {peers} ranks: give input_splits"
            raise ValueError(message)
        return [count // peers] * peers
    sizes = [int(size) for size in splits]
    if len(sizes) != peers or min(sizes) < 0:
        message = f"{name}={sizes}: it must be {peers} numbers from 0, one for each rank of the group"
        raise ValueError(message)
    if count is not None and sum(sizes) != count:
        message = f"{name}={sizes} are {sum(sizes)} rows, but the tensor has {count}"
        raise ValueError(message)
    return sizes


def _exchange_sizes(sent: list[int], device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    import torch

    ones = [1] * len(sent)
    sizes = _exchange(torch.tensor(sent, device=device), ones, ones, group)
    return [int(size) for size in sizes.tolist()]


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    import torch
    import torch.distributed as dist

    whole = rows.resolve_conj().resolve_neg().contiguous()
    result = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    if rows.shape[1:].numel() == 0:
        return result
    if not has_peers(group):
        return result.copy_(whole)
    dist.all_to_all_single(_as_bytes(result), _as_bytes(whole), received, sent, group=group)
    return result


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return rows.view(rows.shape[0], rows.shape[1:].numel()).view(torch.uint8)


@functools.cache
def _exchange_type() -> Any:
    """Make the differentiable exchange: a class below torch's, which can't be defined before torch is imported."""
    import torch

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
        ) -> torch.Tensor:
            ctx.way = (sent, received, group)
            return _exchange(rows, sent, received, group)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            sent, received, group = ctx.way
            sent_back = Exchange.apply(gradients[0], received, sent, group)  # type: ignore[no-untyped-call] # as is torch
            return sent_back, None, None, None

    return Exchange
