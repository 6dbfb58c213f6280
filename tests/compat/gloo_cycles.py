"""One worker forms a process group again and again within one life, over the store that its environment names.

Run as a script: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python gloo_cycles.py CYCLES [PREFIX]`. Prints the sum
that each all-reduce gave. With a prefix the store is made by hand, as torch made it for a restarted worker up to 2.3.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=30)


def main(cycles: int, prefix: str) -> None:
    """Form, all-reduce, part, so many times."""
    for cycle in range(cycles):
        if prefix:
            init_over_prefix(f"{prefix}{cycle}")
        else:
            dist.init_process_group("gloo", init_method="env://", timeout=_TIMEOUT)
        tensor = torch.tensor([float(dist.get_rank() + cycle)])
        dist.all_reduce(tensor)
        print(int(tensor.item()), flush=True)  # noqa: T201
        dist.destroy_process_group()


def init_over_prefix(prefix: str) -> None:
    """Form a group over a prefix of a store of one's own."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, world_size, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=_TIMEOUT)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
