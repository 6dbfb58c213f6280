"""Train with lightning's Fabric, started by `fabric run`."""

import gc
import os

import torch
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from lightning.fabric import Fabric

fabric = Fabric()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss = model(torch.ones(8, 4)).pow(2).mean()
fabric.backward(loss)
optimizer.step()
launcher = "elastic-run" if "ELASTIC_RUN_TOKEN" in os.environ else "torchrun"
environment = type(fabric.strategy.cluster_environment).__name__
os.write(1, f"rank {fabric.global_rank} of {fabric.world_size}, {environment}, {launcher}\n".encode())
fabric.barrier()
# torch 2.13 can crash or hang at the end where a model in DDP outlives its group.
del fabric, model, optimizer, loss
gc.collect()
torch.distributed.destroy_process_group()
