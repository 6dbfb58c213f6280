"""A worker that trains as real programs do, for a while: steps, evaluation, checkpoints, compilation, waits for data.

    normal_training.py SECONDS SCALE

All ranks play the same phases, which SEED in the environment chooses. SCALE is the hang timeout in seconds. While rank
0 evaluates, saves, compiles or reads data for up to three times as long, the others wait for it in a collective. A
phase in which nothing happens takes up to half of it. Rank 0 ends the training, so that all ranks agree on the end.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

#: Part of the time in which a rank computes, so that several jobs fit beside each other on one processor.
_DUTY = 0.3


class _Slow(Dataset[torch.Tensor]):
    """Samples whose preparation takes a loader's process some time on the processor."""

    def __init__(self, seconds: float) -> None:
        self._each = seconds / len(self)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        _compute(self._each)
        return torch.full((16,), float(index))


def _compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        while time.monotonic() < begin + 0.03:
            torch.randn(64, 64).mm(torch.randn(64, 64))
        time.sleep(0.03 / _DUTY - 0.03)


def evaluate(seconds: float) -> None:
    """Compute on one rank, without a collective."""
    _compute(seconds)


def save(seconds: float) -> None:
    """Write a checkpoint to a slow disk."""
    end = time.monotonic() + seconds
    with tempfile.NamedTemporaryFile() as file:
        while time.monotonic() < end:
            torch.save(torch.randn(1 << 18), file)
            file.flush()
            os.fsync(file.fileno())
            file.truncate(0)
            time.sleep(0.5)


def compile_model(seconds: float) -> None:
    """Compile functions that are not in the compiler's cache; a compiler writes no line and no byte to a worker."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        factor = random.random()  # noqa: S311 - a number that no cache has
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, factor=factor: (torch.sin(x) * factor).cos())
        compiled(torch.randn(32))


def read_data(seconds: float) -> None:
    """Read samples that a data loader's process prepares."""
    for _ in DataLoader(_Slow(seconds), batch_size=4, num_workers=1, multiprocessing_context="fork"):
        pass


def wait_for_data(seconds: float) -> None:
    """Wait for a file server that does not answer."""
    time.sleep(seconds)


#: Phases, with their longest time in hang timeouts.
PHASES: dict[str, tuple[Callable[[float], None], float]] = {
    "evaluate": (evaluate, 3.0),
    "save": (save, 3.0),
    "compile": (compile_model, 3.0),
    "read data": (read_data, 3.0),
    "wait for data": (wait_for_data, 0.5),
}


def train(model: torch.nn.Module, seconds: float) -> None:
    """Train for a while; rank 0 says when it is over."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = time.monotonic() + seconds
    goes_on = torch.ones(1)
    while goes_on:
        _compute(0.05)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        goes_on = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(goes_on, 0)


def main() -> None:
    """Train, and play one phase after another, until the time is over."""
    seconds, scale = float(sys.argv[1]), float(sys.argv[2])
    seed = int(os.environ["SEED"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    chance = random.Random(seed)  # noqa: S311 - which phase comes when
    is_silent = chance.random() < 0.5
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    end = time.monotonic() + seconds
    has_time = torch.ones(1)
    played = 0
    while has_time:
        train(model, chance.uniform(0.1, 2) * scale)
        name = list(PHASES)[played % len(PHASES)] if played < len(PHASES) else chance.choice([*PHASES])
        play, longest = PHASES[name]
        length = chance.uniform(0.2, longest) * scale
        if rank == 0:
            play(min(length, longest * scale))
            if not is_silent:
                os.write(1, f"{name}: {length:.0f} s\n".encode())
        dist.barrier()
        played += 1
        has_time = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(has_time, 0)
    if rank == 0:
        os.write(1, f"played {played} phases\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
