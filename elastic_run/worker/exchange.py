"""Each rank sends rows to each rank, and gradients find their way back: what experts and sharded embeddings need.

torch.distributed's own all-to-all stops the gradient, and gloo refuses some types (int16, float8). Rows are sent as
bytes here, which every backend can, without a copy. The way back is the same exchange with the splits swapped,
so it can be differentiated again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_run.worker.reduction import has_peers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

__all__ = ["all_to_all"]


def all_to_all(
    rows: torch.Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send some rows of a tensor to each rank, and return those that came from each; gradients go the way back.

    Every rank of the group calls it, with tensors that differ in the number of rows only.

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
    peers = _group_size(group)
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


def _group_size(group: dist.ProcessGroup | None) -> int:
    import torch.distributed as dist

    return dist.get_world_size(group) if has_peers(group) else 1


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


def _exchange_type() -> Any:
    """Make the differentiable exchange: a class below torch's, which can't be defined before torch is imported."""
    global _Exchange  # noqa: PLW0603 - made once
    if _Exchange is None:
        import torch

        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(
                ctx: Any,
                rows: torch.Tensor,
                sent: list[int],
                received: list[int],
                group: dist.ProcessGroup | None,
            ) -> torch.Tensor:
                ctx.way = (sent, received, group)
                return _exchange(rows, sent, received, group)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                sent, received, group = ctx.way
                sent_back = Exchange.apply(gradients[0], received, sent, group)  # type: ignore[no-untyped-call] # as is torch
                return sent_back, None, None, None

        _Exchange = Exchange
    return _Exchange


_Exchange: Any = None
