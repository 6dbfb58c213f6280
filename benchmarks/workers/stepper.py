"""Fill the flight recorder, say one's pid, and all-reduce 100 times a second."""

import os
import time

import torch
from torch import distributed

distributed.init_process_group("gloo")
tensor = torch.ones(1)
for _ in range(2000):
    distributed.all_reduce(tensor)
os.write(1, b"%d\n" % os.getpid())
while True:
    time.sleep(0.01)
    distributed.all_reduce(tensor)
