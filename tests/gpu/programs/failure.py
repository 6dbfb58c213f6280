"""A job of two ranks in which rank 1 fails while rank 0 waits in NCCL; the argument says how."""

from __future__ import annotations

import os
import signal
import sys
import time

from meeting import RANK, join, say

CASE = sys.argv[1]
join(seconds=10 if CASE == "timeout" else 600, has_own_host=CASE != "duplicate")

import torch
import torch.distributed as dist

ONES = torch.ones(4, device="cuda")
#: Writes to an address that no allocation has.
ILLEGAL = 'extern "C" __global__ void write(int* to) { to[threadIdx.x] = 1; }'


def load_batch() -> None:
    """Sleep for longer than NCCL's timeout, as a slow data loader does."""
    time.sleep(120)


if RANK == 1:
    if CASE == "memory":
        torch.empty(1 << 40, device="cuda")
    elif CASE == "assert":
        ONES[torch.tensor([99], device="cuda")].sum().item()
    elif CASE == "illegal":
        kernel = torch.cuda._compile_kernel(ILLEGAL, "write")  # type: ignore[attr-defined]
        kernel((1, 1, 1), (32, 1, 1), (ONES.data_ptr() + (1 << 44),))
        torch.cuda.synchronize()
    elif CASE == "ordinal":
        torch.cuda.set_device(7)
    elif CASE == "cpu tensor":
        dist.all_reduce(torch.ones(4))
    elif CASE == "exception":
        message = "shard 17 is corrupt"
        raise ValueError(message)
    elif CASE == "fork":
        from torch.utils.data import DataLoader

        class Batches(torch.utils.data.Dataset[torch.Tensor]):
            """A data set that makes tensors on the GPU in a forked process."""

            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.ones(4, device="cuda")

        list(DataLoader(Batches(), num_workers=1))
    elif CASE == "killed":
        say("rank 1 is killed")
        os.kill(os.getpid(), signal.SIGKILL)
    elif CASE == "gone":
        os._exit(0)
    elif CASE == "timeout":
        load_batch()
dist.all_reduce(ONES)
ONES[0].item()
say(f"rank {RANK} done")
