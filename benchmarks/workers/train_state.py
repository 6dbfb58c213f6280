"""Train a model of a given size, and keep its state in each step; print when each step has ended.

    train_state.py MEGABYTES kept
    train_state.py MEGABYTES DIRECTORY    checkpoints of torch.distributed.checkpoint in a directory

A line is `stepped RESTART RANK PID STEP TIME`, with the monotonic clock's nanoseconds.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from elastic_run.worker import KeptState

dist.init_process_group("gloo")
rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
megabytes, how = int(sys.argv[1]), sys.argv[2]
layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(max(1, megabytes // 3))]  # AdamW keeps two more of each
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


class OnDisk:
    """Checkpoints in directories of their own; a file names the newest that is whole."""

    def __init__(self, directory: Path) -> None:
        """Use a directory that is there."""
        self.directory = directory

    def restore(self) -> int:
        """Load the newest; return its step, or 0."""
        newest = self.directory / "newest"
        if not newest.exists():
            return 0
        step = int(newest.read_text())
        of_model, of_optimizer = get_state_dict(model, optimizer)
        load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=self.directory / f"{step}")
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        return step

    def save(self, step: int) -> None:
        """Write a checkpoint, and remove the one before the last."""
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=self.directory / f"{step}")
        if rank == 0:
            (self.directory / "part").write_text(f"{step}")
            (self.directory / "part").replace(self.directory / "newest")
            for old in (self.directory / f"{step - 2}").glob("*"):
                old.unlink()


def choose() -> "KeptState | OnDisk":
    """Return what keeps the state; torchrun's workers need no elastic-run."""
    if how != "kept":
        return OnDisk(Path(how))
    from elastic_run.worker import KeptState

    return KeptState(model=model, optimizer=optimizer)


kept = choose()
step = kept.restore() or 0
while True:
    loss = model(torch.ones(1, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    # One write: lines of two workers do not mix.
    os.write(1, f"stepped {restart} {rank} {os.getpid()} {step} {time.monotonic_ns()}\n".encode())
    kept.save(step)
