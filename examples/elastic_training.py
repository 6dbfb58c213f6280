"""Training that goes on with more workers or fewer, in the middle of an epoch, and uses each sample once.

    elastic-run --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --scale-up-signal=SIGUSR1 examples/elastic_training.py

Start it on one node, later on a second one: the workers are told, save, and go on together. Kill a worker or a node:
the others go on from the checkpoint. It also runs under torchrun, under `srun python`, and in plain python.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_run.worker import ElasticSampler, heartbeat, init_distributed, reduce_mean, stop_requested

if TYPE_CHECKING:
    from elastic_run.worker import WorkerContext

SAMPLES = 480
BATCH_SIZE = 4


class Training:
    """The state of a training: what a checkpoint holds, and how a step changes it.

    Args:
        context: This worker among the others.
        path: The checkpoint, on a disk that all nodes share.
    """

    def __init__(self, context: WorkerContext, path: Path) -> None:
        torch.manual_seed(0)  # the same data and first weights everywhere
        given = torch.randn(SAMPLES, 3)
        wanted = given @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(SAMPLES, 1)
        self.context, self.path = context, path
        self.model = DistributedDataParallel(nn.Linear(3, 1).to(context.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        data = TensorDataset(given, wanted, torch.arange(SAMPLES))
        self.sampler = ElasticSampler(data)
        self.loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=self.sampler)
        self.uses = torch.zeros(SAMPLES)  # by this worker, in this epoch; only to show that each sample is used once
        self.load()

    def load(self) -> None:
        """Take up the checkpoint, if there is one, whatever number of workers wrote it."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        if self.context.is_main:
            self.uses = state["uses"]
            print(f"resumed in epoch {self.sampler.epoch} at sample {self.sampler.consumed}", flush=True)

    def count_uses(self) -> torch.Tensor:
        """Return how often all workers together have used each sample in this epoch; all of them call it."""
        uses = self.uses.to(self.context.device, copy=True)  # NCCL takes tensors of a GPU only
        dist.all_reduce(uses)
        return uses.cpu()

    def save(self) -> None:
        """Write the checkpoint; all workers call it, and rank 0 writes."""
        uses = self.count_uses()
        if not self.context.is_main:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.path.with_suffix(".partial")
        torch.save({**state, "sampler": self.sampler.state_dict(), "uses": uses}, partial)
        partial.replace(self.path)  # a reader sees the old one or the new one, whole

    def step(self, given: torch.Tensor, wanted: torch.Tensor, numbers: torch.Tensor) -> float:
        """Learn from one batch, and return the loss of all workers."""
        loss = nn.functional.mse_loss(self.model(given.to(self.context.device)), wanted.to(self.context.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.uses[numbers] += 1
        return reduce_mean(loss.item())


def train(training: Training, *, epochs: int, save_every: int, pace: float) -> bool:
    """Train to the end, or until the workers are told to stop, and tell whether it is the end."""
    stop_requested()  # from here on SIGTERM is a request
    loss = 0.0
    for epoch in range(training.sampler.epoch, epochs):
        training.sampler.set_epoch(epoch)
        if training.sampler.consumed == 0:
            training.uses.zero_()
        for count, batch in enumerate(training.sampler.track(training.loader), 1):
            loss = training.step(*batch)
            time.sleep(pace)  # stands for the work of a larger model
            heartbeat(training.sampler.consumed)
            # All workers get the same answer, so all leave at the same step.
            is_stopping = stop_requested(everywhere=True)
            if is_stopping or count % save_every == 0:
                training.save()
            if training.context.is_main and count % save_every == 0:
                print(f"epoch {epoch}, sample {training.sampler.consumed}: loss {loss:.4f}", flush=True)
            if is_stopping:
                return False
        uses = training.count_uses()
        if training.context.is_main:
            most, least = int(uses.max()), int(uses.min())
            print(f"epoch {epoch} done: each sample used {least} to {most} times, loss {loss:.4f}", flush=True)
    return True


def main() -> None:
    """Join the others, train, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic.pt"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that every step takes longer")
    arguments = parser.parse_args()
    context = init_distributed()
    # One write, so that the lines of several workers can't mix.
    os.write(1, f"rank {context.rank} of {context.world_size} is process {os.getpid()}\n".encode())
    training = Training(context, arguments.checkpoint)
    is_done = train(training, epochs=arguments.epochs, save_every=arguments.save_every, pace=arguments.pace)
    if context.is_main:
        print("done" if is_done else "saved, and stopped as asked", flush=True)


if __name__ == "__main__":
    main()
