"""Backend and device of a worker, as a table: no machine of the tests has a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_run.worker.place import Choice, PlaceError, choose_device

FOUR_GPUS = {"local_rank": 2, "local_world_size": 4, "device_count": 4, "is_each_its_own": False}
NO_GPU = {**FOUR_GPUS, "device_count": 0}
OWN_GPU = {**FOUR_GPUS, "device_count": 1, "is_each_its_own": True}


@pytest.mark.parametrize(
    ("backend", "device", "machine", "choice"),
    [
        (None, None, FOUR_GPUS, Choice("nccl", "cuda:2")),
        (None, None, OWN_GPU, Choice("nccl", "cuda:0")),
        (None, None, NO_GPU, Choice("gloo", "cpu")),
        (None, "cpu", FOUR_GPUS, Choice("gloo", "cpu")),
        (None, "cuda", FOUR_GPUS, Choice("nccl", "cuda:2")),
        (None, "cuda:3", FOUR_GPUS, Choice("nccl", "cuda:3")),
        ("gloo", None, FOUR_GPUS, Choice("gloo", "cpu")),
        ("gloo", "cuda", FOUR_GPUS, Choice("gloo", "cuda:2")),
        ("nccl", None, FOUR_GPUS, Choice("nccl", "cuda:2")),
        ("cpu:gloo,cuda:nccl", None, FOUR_GPUS, Choice("cpu:gloo,cuda:nccl", "cuda:2")),
        ("xccl", "xpu:1", NO_GPU, Choice("xccl", "xpu:1")),
    ],
)
def test_the_choice(backend: str | None, device: str | None, machine: dict[str, Any], choice: Choice) -> None:
    """CUDA with NCCL where there is a GPU for the worker, gloo on the CPU elsewhere; what was asked for wins."""
    assert choose_device(backend, device, **machine) == choice


@pytest.mark.parametrize(
    ("backend", "device", "machine", "error", "message"),
    [
        ("nccl", "cpu", FOUR_GPUS, ValueError, "backend=nccl works on CUDA devices only, not on device=cpu"),
        ("nccl", None, NO_GPU, PlaceError, "backend=nccl, device=cuda: this process sees no CUDA device"),
        (None, "cuda", NO_GPU, PlaceError, "device=cuda: this process sees no CUDA device"),
        (
            None,
            None,
            {**FOUR_GPUS, "device_count": 2},
            PlaceError,
            "local rank 2 of 4 has no CUDA device of its own, 2",
        ),
        (
            None,
            None,
            {**OWN_GPU, "is_each_its_own": False},
            PlaceError,
            "device of its own, 1 seen from here: start fewer",
        ),
    ],
)
def test_no_device_for_a_worker(
    backend: str | None, device: str | None, machine: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What can't be had is said before anything hangs, with the numbers."""
    with pytest.raises(error) as caught:
        choose_device(backend, device, **machine)
    assert message in str(caught.value)


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cpu", None), ("xpu:1", None)])
def test_the_index_of_a_device(device: str, index: int | None) -> None:
    """Only CUDA devices have one to bind."""
    assert Choice("x", device).index == index
