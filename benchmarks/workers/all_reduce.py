"""What a training script does first: import torch, join the others over gloo, all-reduce. Then it sleeps.

Line, in one piece: ``reduced ATTEMPT RANK PID NANOSECONDS``, the host's clock after the all-reduce.
"""

import os
import signal
import time

import torch
from torch import distributed

distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
now = time.monotonic_ns()
rank, attempt = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if total.item() == distributed.get_world_size():
    os.write(1, b"reduced %d %d %d %d\n" % (attempt, rank, os.getpid(), now))
signal.pause()
