"""Data loading for elastic jobs; these are for training scripts, and only the sampler imports torch.

| module | what it holds |
|---|---|
| `cycling_iterator` | several epochs of data as one iterator |
| `elastic_distributed_sampler` | torch's sampler that goes on in the middle of an epoch with other workers |
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.utils.data.cycling_iterator import CyclingIterator
    from elastic_run.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__ = lazy_names(
    __name__,
    {"CyclingIterator": "cycling_iterator", "ElasticDistributedSampler": "elastic_distributed_sampler"},
)
