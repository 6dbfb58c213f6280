"""A training whose rank 3 never gets its batch: what a launcher says about the hang is the README's second picture."""

import signal

import torch
import torch.distributed as dist


def load_batch(number: int) -> torch.Tensor:
    """Return a batch; the storage of rank 3 stops answering."""
    if number == 6 and dist.get_rank() == 3:
        signal.pause()
    return torch.ones(1)


def train() -> None:
    """Reduce after each step."""
    for number in range(1, 10):
        dist.all_reduce(load_batch(number))


dist.init_process_group("gloo")
train()
