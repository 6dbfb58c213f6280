"""The groups of a job that is parallel in several ways at once, made from their sizes on torch's DeviceMesh.

Model-parallel ranks are neighbours, since they talk most and a node's own links are the fastest; pipeline stages are
farthest apart. It is the order that Megatron and torchtitan use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelGroup", "ParallelGroups", "parallel_groups"]

_WAYS = ("pipeline", "data", "model")


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """This worker's group in one of the ways.

    Attributes:
        group: To give to collectives.
        rank: This worker's rank in it.
        size: How many ranks it has.
    """

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """This worker's groups in all the ways.

    Attributes:
        mesh: The whole, with the dimensions "pipeline", "data" and "model", for torch's own parallel APIs.
        pipeline: Ranks that hold the model's other stages.
        data: Ranks that hold the same weights, and see other data.
        model: Ranks that share each layer's weights.
    """

    mesh: DeviceMesh
    pipeline: ParallelGroup
    data: ParallelGroup
    model: ParallelGroup


def parallel_groups(*, data: int | None = None, pipeline: int = 1, model: int = 1) -> ParallelGroups:
    """Make the groups for data, pipeline and model (tensor) parallelism. Every rank calls it, with the same sizes.

    Args:
        data: How many ranks see different data; None for as many as the others leave.
        pipeline: How many stages the model is cut into.
        model: How many ranks share each layer.

    Returns:
        This worker's groups. Call it once and keep them: each call makes new ones.

    Raises:
        ValueError: A size is less than 1, or they don't multiply to the world size.
        WorkerError: There is no process group yet.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not (dist.is_available() and dist.is_initialized()):
        message = "there is no process group yet: call init_distributed() first"
        raise WorkerError(message)
    shape = mesh_shape(dist.get_world_size(), data=data, pipeline=pipeline, model=model)
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=_WAYS)
    groups = ((mesh.get_group(way), mesh.get_local_rank(way), mesh.size(number)) for number, way in enumerate(_WAYS))
    return ParallelGroups(mesh, *(ParallelGroup(*group) for group in groups))


def mesh_shape(world_size: int, *, data: int | None, pipeline: int, model: int) -> tuple[int, int, int]:
    """Return how many ranks there are in each dimension, in the order pipeline, data, model."""
    others = pipeline * model
    sizes = {"data": data, "pipeline": pipeline, "model": model}
    for name, size in sizes.items():
        # The caller's annotation is a promise, and sizes often come from a file of settings.
        if size is not None and (size < 1 or size != int(size)):
            message = f"{name}={size}: a size is a whole number from 1 up"
            raise ValueError(message)
    if data is None:
        data = max(1, world_size // others)
    if data * others != world_size:
        product = f"data={data} x pipeline={pipeline} x model={model} = {data * others}"
        message = f"{product}, but the world size is {world_size}"
        raise ValueError(message)
    return (pipeline, data, model)
