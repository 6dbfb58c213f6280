"""Train on the GPU with dropout, and kill the worker of the first life after step 20; print each step's loss."""

import os
import signal
import sys

import torch

from elastic_run.worker import KeptState

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
kept = KeptState(model=model, optimizer=optimizer)
step = kept.restore() or 0
while step < 40:
    x = torch.randn(16, 64, device="cuda")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    sys.stdout.write(f"step {step} {loss.item().hex()}\n")
    sys.stdout.flush()
    kept.save(step)
    if step == 20 and sys.argv[1] == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
