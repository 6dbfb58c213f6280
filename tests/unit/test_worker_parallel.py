"""The sizes of a job that is parallel in several ways."""

from __future__ import annotations

import pytest

from elastic_run.worker.parallel import mesh_shape, parallel_groups
from elastic_run.worker.place import WorkerError


@pytest.mark.parametrize(
    ("world_size", "sizes", "shape"),
    [
        (8, {"data": None, "pipeline": 1, "model": 1}, (1, 8, 1)),
        (8, {"data": None, "pipeline": 2, "model": 2}, (2, 2, 2)),
        (12, {"data": 2, "pipeline": 3, "model": 2}, (3, 2, 2)),
        (1, {"data": 1, "pipeline": 1, "model": 1}, (1, 1, 1)),
    ],
)
def test_sizes_make_a_mesh(world_size: int, sizes: dict[str, int], shape: tuple[int, int, int]) -> None:
    """What isn't given of data parallelism is what the others leave."""
    assert mesh_shape(world_size, **sizes) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 2, "pipeline": 1, "model": 2}, "data=2 x pipeline=1 x model=2 = 4, but the world size is 6"),
        ({"data": None, "pipeline": 2, "model": 2}, "= 4, which does not divide the world size, 6"),
        ({"data": 0, "pipeline": 1, "model": 1}, "data=0: a size is a whole number from 1 up"),
        ({"data": None, "pipeline": -1, "model": 1}, "pipeline=-1: a size is a whole number from 1 up"),
        ({"data": None, "pipeline": 1, "model": 1.5}, "model=1.5: a size is a whole number from 1 up"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    """The error has both numbers: the product and the world size."""
    with pytest.raises(ValueError, match="size") as caught:
        mesh_shape(6, **sizes)
    assert message in str(caught.value)


def test_groups_need_a_process_group() -> None:
    """Whoever asks for groups before `init_distributed` is told to call it."""
    with pytest.raises(WorkerError, match=r"call init_distributed\(\) first"):
        parallel_groups()
