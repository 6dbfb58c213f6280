"""A training job that keeps books: which rank took which sample at which step, and from which checkpoint it came.

    elastic-run … tests/chaos/accounted_training.py DIRECTORY

Not a test: the worker of the chaos tests. It trains a small model over gloo until the file `enough` appears.

- Step k is made of the same samples whatever the number of ranks; they are dealt out among the ranks of the moment.
- A *life* is what ranks do together between two starts; its name is new each time. Before a step counts, each rank has
  written down what it took (one write per step), and all have met in the all-reduce of the gradients.
- A checkpoint holds its own ancestry: the lives it is made of, with the steps it has from each. So in the end the books
  can be audited (`tests.chaos.job`): each sample of each step that is in the model, exactly once.
- A file `ask.HOSTNAME` in the directory has a shell command, which a worker on that host runs with its next checkpoint.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

#: Samples in each step. Divisible by any number of ranks that the tests have.
SAMPLES_PER_STEP = 12
WIDTH = 8
#: Seconds that a collective may wait for a rank that is gone: shorter than any test, longer than a stopped peer.
WAIT_LIMIT = dt.timedelta(seconds=10)


def make_sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample's input and target: always the same for the same number."""
    given = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
    return given, given * torch.arange(1.0, WIDTH + 1)


class Books:
    """What one rank writes down, in a file of its own in each life.

    Args:
        directory: Where the books are.
        life: The name of this life.
    """

    def __init__(self, directory: Path, life: str) -> None:
        path = directory / "books" / f"{life}.{dist.get_rank()}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, step: int, samples: list[int]) -> None:
        """Write down the samples of a step, whole or not at all."""
        os.write(self._file, (json.dumps({"step": step, "samples": samples}) + "\n").encode())


class Checkpoint:
    """The model's state on the shared disk, with its ancestry.

    Args:
        directory: Where it is.
        model: The model.
    """

    def __init__(self, directory: Path, model: torch.nn.Module) -> None:
        self._directory = directory
        self._model = model
        self._ancestry: list[dict[str, object]] = []
        self.step = 0

    def load(self) -> None:
        """Take up the last state, if there is one."""
        path = self._directory / "model.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._ancestry = state["ancestry"]
            self.step = state["step"]

    def save(self, step: int, life: str, loss: float) -> None:
        """Write the state so that a reader sees the old or the new one, whole; then say so where the tests look."""
        own = {"life": life, "first": self.step, "last": step, "ranks": dist.get_world_size()}
        state = {"model": self._model.state_dict(), "step": step}
        ancestry = [*self._ancestry, own]
        partial = self._directory / f"model.{life}.partial"
        torch.save({**state, "ancestry": ancestry}, partial)
        partial.replace(self._directory / "model.pt")
        progress = {"step": step, "loss": loss, "life": life, "ranks": dist.get_world_size(), "ancestry": ancestry}
        note = self._directory / f"progress.{life}.partial"
        note.write_text(json.dumps(progress), encoding="ascii")
        note.replace(self._directory / "progress.json")


def name_life() -> str:
    """Let rank 0 invent a name for this life."""
    names = [uuid.uuid4().hex[:8]]
    dist.broadcast_object_list(names)
    return names[0]


def is_enough(directory: Path) -> bool:
    """Tell all ranks alike whether the tests have seen enough."""
    word = torch.tensor([float((directory / "enough").exists())]) if dist.get_rank() == 0 else torch.zeros(1)
    dist.broadcast(word, 0)
    return bool(word.item())


def do_what_is_asked(directory: Path) -> None:
    """Run the command that the tests have for a worker on this host, once."""
    path = directory / f"ask.{socket.gethostname()}"
    if path.exists():
        command = path.read_text(encoding="ascii")
        path.unlink()
        subprocess.run(["sh", "-c", command], check=True)


def train(directory: Path, *, save_every: int, pace: float) -> None:
    """Train until it is enough."""
    rank, ranks, life = dist.get_rank(), dist.get_world_size(), name_life()
    torch.manual_seed(0)
    # No DDP and no optimizer: both import torch's compiler, which takes two seconds of a processor in each life.
    model = torch.nn.Linear(WIDTH, WIDTH)
    checkpoint, books = Checkpoint(directory, model), Books(directory, life)
    checkpoint.load()
    where = f"rank {rank} of {ranks} on {socket.gethostname()}"
    print(f"life {life}: {where} from step {checkpoint.step}", flush=True)  # noqa: T201 - a training script prints
    step = checkpoint.step
    while True:
        samples = list(range(step * SAMPLES_PER_STEP, (step + 1) * SAMPLES_PER_STEP))[rank::ranks]
        given, wanted = (torch.stack(column) for column in zip(*map(make_sample, samples), strict=True))
        loss = torch.nn.functional.mse_loss(model(given), wanted)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has no types there
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.2 / ranks * parameter.grad
        books.note(step, samples)
        step += 1
        time.sleep(pace)  # the work of a larger model
        if step % save_every == 0:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)  # and so every rank has written down its part of these steps
            if rank == 0:
                checkpoint.save(step, life, mean.item())
            do_what_is_asked(directory)
            if is_enough(directory):
                return


def main() -> int:
    """Join the others, train, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of every step")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=WAIT_LIMIT)
    train(arguments.directory, save_every=arguments.save_every, pace=arguments.pace)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
