"""Go on from the last step after a restart: the launcher keeps the state in memory.

    elastic-run --standalone --nproc-per-node=2 --max-restarts=1 --keep-state=64MB examples/kept_state.py

Two lines beside an ordinary training loop: `restore` before it, `save` in it. On purpose, rank 1 is killed once after
step 50. The other launchers ignore both lines, so the script runs under torchrun too.
"""

import os
import signal

import torch
import torch.distributed as dist

from elastic_run.worker import KeptState

STEPS = 100

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

kept = KeptState(model=model, optimizer=optimizer)
step = kept.restore() or 0
print(f"rank {rank} begins after step {step}", flush=True)
while step < STEPS:
    x = torch.randn(32, 10)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    kept.save(step)
    if step == STEPS // 2 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print(f"done at step {step}")
dist.destroy_process_group()
