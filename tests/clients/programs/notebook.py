"""Train a function with accelerate's notebook_launcher; `fail` as the argument makes rank 1 fail."""

import os
import sys

import torch
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from accelerate import Accelerator, notebook_launcher


def train(how):
    """Train a little, as a cell of a notebook would."""
    accelerator = Accelerator(cpu=True)
    if how == "fail" and accelerator.process_index == 1:
        raise RuntimeError("out of luck")
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)), "sum").item()
    launcher = "elastic-run" if "ELASTIC_RUN_TOKEN" in os.environ else "torchrun"
    os.write(
        1, f"rank {accelerator.process_index} of {accelerator.num_processes}, sum {total:g}, {launcher}\n".encode()
    )
    accelerator.end_training()


if __name__ == "__main__":
    notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port="0")
    print("the notebook goes on", flush=True)
