"""Train with accelerate. With the argument `crash` rank 1 fails in its first life; with `wait` all ranks wait."""

import os
import signal
import sys

import torch
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
how = sys.argv[1:]
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if accelerator.process_index == 1 and how == ["crash"] and life == 0:
    raise RuntimeError("out of luck")
if how == ["wait"]:
    os.write(1, b"waiting\n")
    signal.pause()
steps = 0
for inputs, targets in loader:
    loss = ((model(inputs) - targets) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
accelerator.wait_for_everyone()
launcher = "elastic-run" if "ELASTIC_RUN_TOKEN" in os.environ else "torchrun"
who = f"rank {accelerator.process_index} of {accelerator.num_processes}"
os.write(1, f"{who}, {type(model).__name__}, {steps} steps, life {life}, {launcher}\n".encode())
accelerator.end_training()
