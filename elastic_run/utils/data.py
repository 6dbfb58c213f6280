"""Data loading for elastic jobs: torch's own classes. `elastic_run.worker` has an `ElasticSampler` beside them."""

from __future__ import annotations

from elastic_run import alias_modules, lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed.elastic.utils.data.cycling_iterator import CyclingIterator
    from torch.distributed.elastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

_TORCHS = "torch.distributed.elastic.utils.data"
__getattr__ = lazy_names(__name__, {"CyclingIterator": _TORCHS, "ElasticDistributedSampler": _TORCHS})
alias_modules(__name__, {name: (f"{_TORCHS}.{name}",) for name in ("cycling_iterator", "elastic_distributed_sampler")})
