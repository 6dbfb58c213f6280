"""A launcher that makes torch's own rendezvous by hand, as some programs do: a store, a backend on it, a handler."""

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def train(share: int) -> float:
    """Add up the ranks, each with a share."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + share))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


if __name__ == "__main__":
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handler = DynamicRendezvousHandler.from_backend(
        run_id="by-hand", store=store, backend=C10dRendezvousBackend(store, "by-hand"), min_nodes=1, max_nodes=1
    )
    spec = WorkerSpec(role="trainer", local_world_size=2, entrypoint=train, args=(1,), rdzv_handler=handler)
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(), start_method="spawn")
    result = agent.run()
    print(f"{result.state.name}: {result.return_values}")
    print(f"agent: {type(agent).__module__.partition('.')[0]}")
