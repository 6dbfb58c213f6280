"""All-reduces once and ends; says which devices the worker sees, and how long each step took."""

from __future__ import annotations

import os
import time

BEGAN_AT = time.monotonic()

from meeting import RANK, join, say

say(
    f"rank {RANK} sees LOCAL_RANK={os.environ['LOCAL_RANK']}",
    f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}",
)
import torch
import torch.distributed as dist

imported_at = time.monotonic()
say(f"rank {RANK} has {torch.cuda.device_count()} devices")
join()
say(f"rank {RANK} import {imported_at - BEGAN_AT:.2f} s, all-reduce {time.monotonic() - imported_at:.2f} s")
dist.destroy_process_group()
