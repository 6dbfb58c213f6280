"""Print what it takes to keep and to restore a state, beside a plain copy of the same bytes into a memfd.

    copy_state.py MEGABYTES TIMES

Lines are `save SECONDS PLAIN` and `restore SECONDS PLAIN`, a pair for each time; the first ones are not printed, since
the kernel gives the pages then.
"""

import mmap
import os
import sys
import time

import torch

from elastic_run.worker import KeptState

_PARTS = 16
size, times = int(sys.argv[1]) << 20, int(sys.argv[2])
model = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(size // 4 // _PARTS)) for _ in range(_PARTS))
kept = KeptState(model=model)
descriptor = os.memfd_create("plain")
os.ftruncate(descriptor, size)
plain = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.float32).chunk(_PARTS)


def copy(*, back: bool) -> float:
    """Copy the parameters to the plain memory, or back; return the seconds that it took."""
    begun = time.perf_counter()
    with torch.no_grad():
        for ours, theirs in zip(model, plain, strict=True):
            (ours if back else theirs).copy_(theirs if back else ours)
    return time.perf_counter() - begun


for step in range(times + 2):  # two halves of the memory
    bare = copy(back=False)
    begun = time.perf_counter()
    kept.save(step)
    taken = time.perf_counter() - begun
    # Checksums are computed while a training goes on.
    time.sleep(size / 2e9)
    if step >= 2:
        print("save", taken, bare, flush=True)
for number in range(times + 1):
    bare = copy(back=True)
    begun = time.perf_counter()
    kept.restore()
    if number:
        print("restore", time.perf_counter() - begun, bare, flush=True)
