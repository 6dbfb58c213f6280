"""Which device a worker computes on, and which backend its process group takes: decided purely, then bound.

With one device per worker in sight (Slurm's --gpus-per-task, --virtual-local-rank) it is number 0 for all; otherwise
the local rank chooses. A worker that would share another's device is refused: NCCL can't do that, and says so
late and unclearly.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_run.worker.errors import PlaceError

__all__ = ["Choice", "choose"]

_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and the device that goes with it, as torch names them."""

    backend: str
    device: str

    @property
    def index(self) -> int | None:
        """The CUDA device's number, or None for any other device."""
        kind, _, number = self.device.partition(":")
        return int(number) if kind == _CUDA and number else None


def choose(
    backend: str | None,
    device: str | None,
    *,
    local_rank: int,
    local_world_size: int,
    device_count: int,
    is_each_its_own: bool,
) -> Choice:
    """Choose backend and device.

    Args:
        backend: What the script asked for, or None.
        device: Likewise; a CUDA device may be given without its number.
        local_rank: Of this worker.
        local_world_size: Workers on this node.
        device_count: CUDA devices that this process sees; 0 where CUDA can't be used.
        is_each_its_own: Whether workers may see different devices, since something limits what they see.

    Raises:
        PlaceError: There is no device for this worker.
        ValueError: NCCL, and a device that isn't CUDA.
    """
    wants_nccl = backend is not None and "nccl" in backend
    if device is None:
        wants_cuda = wants_nccl or (backend is None and device_count > 0)
        device = _CUDA if wants_cuda else "cpu"
    kind = device.partition(":")[0]
    if wants_nccl and kind != _CUDA:
        message = f"backend={backend} works on CUDA devices only, not on device={device}"
        raise ValueError(message)
    if kind == _CUDA and not device_count:
        asked = f"device={device}" if backend is None else f"backend={backend}, device={device}"
        message = f"{asked}: this process sees no CUDA device (CUDA_VISIBLE_DEVICES, the driver, torch built for CUDA?)"
        raise PlaceError(message)
    if device == _CUDA:
        device = f"{_CUDA}:{_index(local_rank, local_world_size, device_count, is_each_its_own=is_each_its_own)}"
    return Choice(backend or ("nccl" if kind == _CUDA else "gloo"), device)


def _index(local_rank: int, local_world_size: int, device_count: int, *, is_each_its_own: bool) -> int:
    if local_rank < device_count:
        return local_rank
    if device_count == 1 and is_each_its_own:
        return 0
    message = (
        f"local rank {local_rank} of {local_world_size} has no CUDA device of its own, {device_count} seen from here: "
        "start fewer workers on each node (--nproc-per-node=gpu), or ask for device='cpu'"
    )
    raise PlaceError(message)
