"""One worker forms a process group again and again within one life, over the store that its environment names.

Run as a script: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python gloo_cycles.py CYCLES`. Prints the sum that each
all-reduce gave.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main(cycles: int) -> None:
    """Form, all-reduce, part, so many times."""
    for cycle in range(cycles):
        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=30))
        tensor = torch.tensor([float(dist.get_rank() + cycle)])
        dist.all_reduce(tensor)
        print(int(tensor.item()), flush=True)  # noqa: T201
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
