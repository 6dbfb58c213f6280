"""Sum the ranks up; what torchx's dist.ddp starts."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
launcher = "elastic-run" if "ELASTIC_RUN_TOKEN" in os.environ else "torchrun"
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {total.item():g}, {launcher}\n".encode())
dist.destroy_process_group()
