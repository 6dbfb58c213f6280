"""A launcher of one's own, as torch's documentation suggests: a registered handler, a worker spec, a local agent.

Usage: launcher.py WORKERS FIRST; the workers add their ranks up, which are counted from FIRST.
"""

from __future__ import annotations

import sys

import meeting
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry


@record
def train(first: str) -> float:
    """Add the ranks up with the other workers."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + int(first)))
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
    print("returned:", sorted(result.return_values.items()))
    print("agent:", type(agent).__mro__[0].__module__.partition(".")[0])


if __name__ == "__main__":
    main()
