"""How the programs of these tests meet: all ranks share the machine's first GPU, as ranks of different hosts.

NCCL refuses two ranks on one GPU of one host. If each rank has its own NCCL_HOSTID, NCCL takes the
ranks for different hosts and connects them by sockets.
"""

from __future__ import annotations

import os
from datetime import timedelta

RANK = int(os.environ["RANK"])


def say(*words: object) -> None:
    """Write one line to stdout with one write, so that lines of several ranks don't mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def join(*, seconds: float = 600.0, has_own_host: bool = True) -> None:
    """Join NCCL's process group and all-reduce once."""
    if has_own_host:
        os.environ["NCCL_HOSTID"] = f"host-{RANK}"
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=seconds))
    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones)
    say(f"rank {RANK} began: {ones[0].item()}")
