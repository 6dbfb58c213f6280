"""What a training script may import: joining the other workers, and going on when their number changes.

The same lines work under elastic-run, under torchrun, under ``srun python`` and in plain python as one process. Nothing
here imports the launcher, but `launch_subprocesses`, which starts it. torch is imported by the functions that need it.

| module | what it holds |
|---|---|
| `heartbeats` | heartbeats of a worker |
| `devices` | which device a worker computes on, and which backend its process group takes |
| `distributed` | `init_distributed`, and what this worker is |
| `errors` | errors of a worker before it trains |
| `exchange` | each rank sends rows to each rank, with gradients |
| `joining` | how workers join: the store, the process group, one all-reduce |
| `launching` | a script that starts its own workers |
| `leaving` | how a worker ends its process groups |
| `parallel` | the groups of a job that is parallel in several ways, on torch's DeviceMesh |
| `place` | which worker this process is, read from the environment: from torchrun's variables, or from Slurm's |
| `reduction` | small agreements of all ranks: a mean, a yes or no |
| `sampler` | a sampler that goes on in the middle of an epoch, with another number of workers |
| `stopping` | whether this worker was told that it will be stopped |
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.worker.distributed import WorkerContext, init_distributed, is_main, local_rank, rank, world_size
    from elastic_run.worker.errors import JoinError, PlaceError, WorkerError
    from elastic_run.worker.exchange import all_to_all
    from elastic_run.worker.heartbeats import heartbeat
    from elastic_run.worker.launching import launch_subprocesses
    from elastic_run.worker.parallel import ParallelGroup, ParallelGroups, parallel_groups
    from elastic_run.worker.reduction import reduce_mean
    from elastic_run.worker.sampler import ElasticSampler
    from elastic_run.worker.stopping import stop_requested

__all__ = [
    "ElasticSampler",
    "JoinError",
    "ParallelGroup",
    "ParallelGroups",
    "PlaceError",
    "WorkerContext",
    "WorkerError",
    "all_to_all",
    "heartbeat",
    "init_distributed",
    "is_main",
    "launch_subprocesses",
    "local_rank",
    "parallel_groups",
    "rank",
    "reduce_mean",
    "stop_requested",
    "world_size",
]

# Modules are named unlike the functions in them: a submodule that is imported would otherwise hide its function.
__getattr__ = lazy_names(
    __name__,
    {
        "WorkerContext": "distributed",
        "init_distributed": "distributed",
        "is_main": "distributed",
        "local_rank": "distributed",
        "rank": "distributed",
        "world_size": "distributed",
        "JoinError": "errors",
        "PlaceError": "errors",
        "WorkerError": "errors",
        "all_to_all": "exchange",
        "heartbeat": "heartbeats",
        "launch_subprocesses": "launching",
        "ParallelGroup": "parallel",
        "ParallelGroups": "parallel",
        "parallel_groups": "parallel",
        "reduce_mean": "reduction",
        "ElasticSampler": "sampler",
        "stop_requested": "stopping",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
