"""Two ranks that hang, or that compute for a long time without output; the argument names the case."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

from meeting import RANK, join, say

CASE, ATTEMPT = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
#: Cycles of a kernel's clock, about one second on an H100; and of a kernel that does not end while a test runs.
SECOND = 1_700_000_000
SLEEPS_IN_DRIVER = 4  # cudaDeviceScheduleBlockingSync

if CASE == "quiet kernel":
    import torch

    assert ctypes.CDLL("libcudart.so.13").cudaSetDeviceFlags(SLEEPS_IN_DRIVER) == 0
join()

import torch
import torch.distributed as dist

ONES = torch.ones(4, device="cuda")
if CASE == "backward":
    MODEL = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())


def load_batch() -> None:
    """Read a batch, for ever."""
    time.sleep(3600)


def take_lock() -> None:
    """Wait for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def compute(seconds: int) -> None:
    """Let the GPU compute, one kernel of some seconds, and wait for it."""
    torch.cuda._sleep(seconds * SECOND)
    torch.cuda.synchronize()


def multiply(seconds: int) -> None:
    """Multiply matrices on the GPU for some seconds."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            product = matrix @ matrix
        product.sum().item()


def reduce() -> None:
    """All-reduce, and wait for the sum."""
    dist.all_reduce(ONES)
    ONES[0].item()


say(f"rank {RANK} case {CASE}")
if CASE == "item":
    load_batch() if RANK == 1 else reduce()
elif CASE == "synchronize":
    if RANK == 1:
        take_lock()
    dist.all_reduce(ONES)
    torch.cuda.synchronize()
elif CASE == "barrier":
    load_batch() if RANK == 1 else dist.barrier()
elif CASE == "backward":
    if RANK == 1:
        load_batch()
    loss = MODEL(torch.ones(4, 4, device="cuda")).sum()
    loss.backward()
    loss.item()
elif CASE == "once":
    if RANK == 1 and ATTEMPT == "0":
        load_batch()
    reduce()
elif CASE == "shape":
    ONES = torch.ones(4 if RANK == 0 else 1 << 24, device="cuda")
    reduce()
elif CASE == "operation":
    if RANK == 1:
        dist.broadcast(torch.ones(1 << 24, device="cuda"), 1)
    reduce()
elif CASE == "kernel":
    if RANK == 1:
        torch.cuda._sleep(3600 * SECOND)
    reduce()
elif CASE == "long kernel":
    if RANK == 1:
        compute(14)
    reduce()
elif CASE == "quiet kernel":
    compute(14)
    reduce()
elif CASE == "matrices":
    multiply(14)
    reduce()
elif CASE == "ends":
    if RANK == 0:
        reduce()
    say("rank 1 ends")
    sys.stdout.flush()
    os._exit(0)
say(f"rank {RANK} done")
dist.destroy_process_group()
