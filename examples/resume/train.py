"""Train a small language model with DDP, save checkpoints, and resume from the last checkpoint after a restart.

    elastic-run --standalone --nproc-per-node=2 --max-restarts=3 examples/resume/train.py --checkpoint=model.pt

The model reads characters and predicts the next one. The text counts ("417 418 419 420" and so on), so the model learns
that a space follows three digits, that the first two digits mostly stay, and at last how to count.

After SIGUSR1, which a scheduler sends before it stops the job, the workers write a checkpoint at the end of the step.
elastic-run passes this signal on to workers that handle it.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ALPHABET = "0123456789 "
CONTEXT = 36

is_warned = threading.Event()


class Model(nn.Module):
    """A transformer of two layers over characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.predict = nn.Linear(width, len(ALPHABET))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next character at each place."""
        hidden = self.embed(text) + self.place(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        scores: torch.Tensor = self.predict(self.layers(hidden, mask=mask, is_causal=True))
        return scores


def make_batch(step: int, rank: int, size: int = 32) -> torch.Tensor:
    """Return rows of counting, as character numbers: always the same for the same step and rank."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    rows = []
    for first in torch.randint(100, 990, (size,), generator=generator).tolist():
        text = " ".join(str(number) for number in range(first, first + 10))
        rows.append([ALPHABET.index(character) for character in text[: CONTEXT + 1]])
    return torch.tensor(rows)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint beside its place, then move it there: a reader sees the old one or the new one, whole."""
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the checkpoint, if there is one, and return the step to go on with."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["step"])


def train(path: Path, steps: int, save_every: int) -> None:
    """Train, all ranks together, and save from rank 0."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same first weights everywhere
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(path, model, optimizer)
    if rank == 0 and first:
        print(f"resumed at step {first}")
    for step in range(first, steps):
        text = make_batch(step, rank)
        scores = model(text[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if rank == 0 and (step == first or done % save_every == 0):
            print(f"step {done}: loss {loss.item():.3f}")
        if rank == 0 and (is_warned.is_set() or done % save_every == 0):
            save(path, model, optimizer, done)
            if is_warned.is_set():
                print(f"warned: saved at step {done}")
                is_warned.clear()


def main() -> None:
    """Join the other workers, train, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("model.pt"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    signal.signal(signal.SIGUSR1, lambda *_: is_warned.set())
    dist.init_process_group("gloo")
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}: the workers are {pids}")
    train(arguments.checkpoint, arguments.steps, arguments.save_every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
