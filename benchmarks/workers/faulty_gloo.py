"""A worker of gloo that trains in one group, or in groups of four, until a rank has its fault.

Collectives time out after three seconds, so that ranks that wait for one fail in a job that nobody watches.
"""

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

FAULT, RANK, GROUPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS, AT = 40, 3
#: Seconds after which a collective that not all ranks join fails; a hang that a verdict has to find must last longer.
TIMEOUT = float(sys.argv[4])


def raise_error() -> None:
    """Fail as a program does."""
    raise ValueError("bad batch")


def hold_gil() -> None:
    """Wait in C for ever without letting other threads run; no signal interrupts it."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def sleep_long() -> None:
    """Wait for nothing."""
    time.sleep(600)


def wait_for_thread() -> None:
    """Wait for the result of a thread that has died."""
    results: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: results.put(os.environ["SHARD_THAT_IS_NOT_THERE"])).start()
    results.get()


class Samples(torch.utils.data.Dataset[int]):
    """Samples whose loading hangs or dies."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if FAULT == "data loader child killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return index


def load_data() -> None:
    """Load a batch in a child process."""
    next(iter(torch.utils.data.DataLoader(Samples(), num_workers=1)))


FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    **{name: partial(os.kill, os.getpid(), getattr(signal, name)) for name in ("SIGKILL", "SIGTERM", "SIGSTOP")},
    "exit code": lambda: sys.exit(7),
    "early exit 0": lambda: sys.exit(0),
    "data loader child killed": load_data,
    "data loader stuck": load_data,
    "held GIL": hold_gil,
    "sleep": sleep_long,
    **dict.fromkeys(
        ("missing rank in a group", "missing rank in a collective"), lambda: dist.all_reduce(torch.ones(4))
    ),
    "thread died": wait_for_thread,
}
dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
rank, size = dist.get_rank(), dist.get_world_size()
group = None
if GROUPS > 1 or FAULT.startswith("missing rank"):
    per = size // GROUPS
    for first in range(0, size, per):
        made = dist.new_group(range(first, first + per), timeout=timedelta(seconds=TIMEOUT), group_desc="inner")
        group = made if first <= rank < first + per else group
for step in range(STEPS):
    is_planted = rank == RANK and step == AT
    if is_planted:
        os.write(1, f"planted {time.time()}\n".encode())
        FAULTS.get(FAULT, int)()
    if is_planted and FAULT == "mismatched collective":
        dist.broadcast(torch.ones(4), dist.get_global_rank(group, 0) if group else 0, group=group)
    else:
        dist.all_reduce(torch.ones(8 if is_planted and FAULT == "mismatched shape" else 4), group=group)
    if group is not None and step % 4 == 1:
        dist.all_reduce(torch.ones(4))
