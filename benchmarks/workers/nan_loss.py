"""A training whose loss becomes NaN on rank 1: what a launcher says about its end is the README's picture."""

import torch.distributed as dist


def step(number: int) -> None:
    """Do nothing, but fail as a training loop does that checks its loss."""
    if number == 3 and dist.get_rank() == 1:
        msg = f"loss is nan at step {number}"
        raise ValueError(msg)


def train() -> None:
    """Meet after each step."""
    for number in range(5):
        step(number)
        dist.barrier()


dist.init_process_group("gloo")
train()
