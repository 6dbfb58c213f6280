"""Data loading for elastic jobs: torch's own classes. `elastic_run.worker` has an `ElasticSampler` beside them."""

from __future__ import annotations

from elastic_run import alias_modules, lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed.elastic.utils.data.cycling_iterator import CyclingIterator
    from torch.distributed.elastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "torch.distributed.elastic.utils.data"))
alias_modules(
    __name__,
    {
        name: (f"torch.distributed.elastic.utils.data.{name}",)
        for name in ("cycling_iterator", "elastic_distributed_sampler")
    },
)
