"""Keep the state of a sharded model (FSDP2): each rank keeps its shards, and they come back on any number of ranks.

    elastic-run --standalone --nproc-per-node=2 --max-restarts=1 --keep-state=64MB examples/kept_state_fsdp.py

On GPUs the same script shards over them. With several nodes, `--keep-state-copies=1` keeps each shard on a second node.
On purpose, rank 1 fails once after step 50.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elastic_run.worker import ElasticSampler, KeptState

STEPS = 100

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 16))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
for layer in model:
    if any(True for _ in layer.parameters()):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = ElasticSampler(data, seed=0)
loader: torch.utils.data.DataLoader[tuple[torch.Tensor, ...]] = torch.utils.data.DataLoader(
    data, batch_size=32, sampler=sampler
)

kept = KeptState(model=model, optimizer=optimizer, sampler=sampler)
step = kept.restore() or 0
print(f"rank {rank} begins after step {step}", flush=True)
while step < STEPS:
    for (batch,) in sampler.track(loader):  # an epoch, from where it was
        x = batch.to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        kept.save(step)
        if step == STEPS // 2 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit("on purpose")
        if step == STEPS:
            break
    else:
        sampler.set_epoch(sampler.epoch + 1)
if rank == 0:
    print(f"done at step {step}")
dist.destroy_process_group()
