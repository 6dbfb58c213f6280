"""A launcher of one's own, as torch's documentation suggests: a registered handler, a worker spec, a local agent.

Usage: launcher.py WORKERS HOW; the workers add their ranks up, and with `fail` for HOW rank 1 raises.
"""

from __future__ import annotations

import os
import sys

import meeting
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry


@record
def train(how: str) -> float:
    """Add the ranks up with the other workers."""
    import torch
    import torch.distributed as dist

    if how == "fail" and os.environ["RANK"] == "1":
        message = "out of luck"
        raise RuntimeError(message)
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def main() -> None:
    """Run the job and tell what came of it."""
    rendezvous_handler_registry.register("by-hand", meeting.Meeting)
    parameters = RendezvousParameters("by-hand", "127.0.0.1", "job7", 1, 1)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=int(sys.argv[1]),
        fn=train,
        args=(sys.argv[2],),
        rdzv_handler=rendezvous_handler_registry.create_handler(parameters),
        max_restarts=0,
        monitor_interval=0.05,
    )
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(), start_method="spawn")
    result = agent.run()
    if result.is_failed():
        first = min(result.failures.values(), key=lambda failure: failure.timestamp)
        print("failed:", first.message["message"])
    else:
        print("returned:", sorted(result.return_values.items()))
    print("agent:", type(agent).__mro__[0].__module__.partition(".")[0])


if __name__ == "__main__":
    main()
