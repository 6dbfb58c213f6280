"""What a training script may import: joining the other workers, and going on when their number changes.

The same lines work under elastic-run, under torchrun, under ``srun python`` and in plain python as one process. Nothing
here imports the launcher, but `launch_subprocesses`, which starts it. torch is imported by the functions that need it.
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.worker.collectives import all_to_all, reduce_mean
    from elastic_run.worker.distributed import WorkerContext, init_distributed, is_main, local_rank, rank, world_size
    from elastic_run.worker.heartbeats import heartbeat
    from elastic_run.worker.kept_memory import DamagedStateError, KeptStateError, StateTooLargeError
    from elastic_run.worker.kept_state import KeptState
    from elastic_run.worker.launching import launch_subprocesses
    from elastic_run.worker.memory_storage import MemoryReader, MemoryWriter
    from elastic_run.worker.parallel import ParallelGroup, ParallelGroups, parallel_groups
    from elastic_run.worker.place import JoinError, PlaceError, WorkerError
    from elastic_run.worker.sampler import ElasticSampler
    from elastic_run.worker.stopping import stop_requested

__all__ = [
    "DamagedStateError",
    "ElasticSampler",
    "JoinError",
    "KeptState",
    "KeptStateError",
    "MemoryReader",
    "MemoryWriter",
    "ParallelGroup",
    "ParallelGroups",
    "PlaceError",
    "StateTooLargeError",
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
        "JoinError": "place",
        "PlaceError": "place",
        "WorkerError": "place",
        "all_to_all": "collectives",
        "heartbeat": "heartbeats",
        "DamagedStateError": "kept_memory",
        "KeptStateError": "kept_memory",
        "StateTooLargeError": "kept_memory",
        "KeptState": "kept_state",
        "MemoryReader": "memory_storage",
        "MemoryWriter": "memory_storage",
        "launch_subprocesses": "launching",
        "ParallelGroup": "parallel",
        "ParallelGroups": "parallel",
        "parallel_groups": "parallel",
        "reduce_mean": "collectives",
        "ElasticSampler": "sampler",
        "stop_requested": "stopping",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
