"""The smallest distributed training: each worker has its own data, and all workers train the same model.

elastic-run --standalone --nproc-per-node=2 examples/minimal_ddp.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    """Fit the model to this worker's data and to all others'."""
    torch.manual_seed(rank)  # each worker's own data: y = 2a + 3b
    inputs = torch.randn(64, 2)
    targets = inputs @ torch.tensor([[2.0], [3.0]])

    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # averages the gradients over all workers
        optimizer.step()

    if rank == 0:
        a, b = model.module.weight[0].tolist()
        print(f"learned y = {a:.2f}a + {b:.2f}b on {dist.get_world_size()} workers")


dist.init_process_group("gloo")  # address, rank and world size come from elastic-run
train(dist.get_rank())  # in a function: the model must not outlive the group
dist.destroy_process_group()
