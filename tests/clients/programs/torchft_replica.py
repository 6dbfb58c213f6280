"""One rank of a replica group of torchft: trains with the other groups, through the death of one of them.

Arguments: the group's name, the step from which on its rank 1 kills itself in the group's first life (-1: never), and a
file that the group makes in its second life.

A group that joins takes the step of the others, so it may never see one certain step, and its first life must not end
well. The others train on until a second life is among them: only then the file is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS = 12

group, fatal_step, restarted = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restarts:
    restarted.touch()
dist.init_process_group("gloo")  # of the group's own ranks
torch.manual_seed(len(group) + restarts)  # the groups begin with different weights
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.01)


def load(state: dict[str, dict[str, object]]) -> None:
    """Take what another group has."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    replica_id=f"group_{group}_",
)
parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
while not restarted.exists() or manager.current_step() < STEPS or manager.num_participants() < 2:
    if (rank, restarts) == (1, 0) and 0 <= fatal_step <= manager.current_step():
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    parallel(torch.full((8, 4), float(rank + 1))).sum().backward()
    optimizer.step()
    time.sleep(0.05)  # stands for the work of a larger model
weights = " ".join(f"{weight:.4f}" for weight in model.weight.flatten().tolist())
print(f"group {group}, rank {rank}, restarts {restarts}, step {manager.current_step()}: {weights}", flush=True)
dist.barrier()  # the manager of rank 0 answers all ranks of the group
manager.shutdown(wait=False)
os._exit(0)  # threads of the manager still wait for the lighthouse
