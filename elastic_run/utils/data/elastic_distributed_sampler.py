"""torch's sampler for elastic jobs, under its name there; this project's own one is `worker.sampler`."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

__all__ = ["ElasticDistributedSampler"]

_T = TypeVar("_T")


class ElasticDistributedSampler(DistributedSampler[_T]):
    """Share out what is left of a data set from `start_index` on, shuffled by the epoch's number.

    Give it to a DataLoader in each worker. The data set's size must not change. The last indices are filled up with
    the first ones until each worker has the same number.

    Args:
        dataset: The data; it has a length.
        num_replicas: Number of workers; None for the process group's size.
        rank: Rank of this worker; None for its rank in the process group.
        start_index: Index of the first sample that has not been used yet.

    Raises:
        TypeError: The data set has no length.
        ValueError: The start lies behind the end of the data set.
    """

    def __init__(
        self, dataset: Dataset[_T], num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
    ) -> None:
        if not isinstance(dataset, Sized):
            message = f"the data set of type {type(dataset).__name__} has no length"
            raise TypeError(message)
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        self.remaining = len(dataset) - start_index
        if self.remaining <= 0:
            message = f"start index {start_index} is not below the data set's size, {len(dataset)}"
            raise ValueError(message)
        self.start_index = start_index
        self.num_samples = -(-self.remaining // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[_T]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        indices = torch.randperm(self.remaining, generator=generator).add(self.start_index).tolist()
        # As often as it takes: with fewer samples left than workers torch's sampler fails here.
        filled = indices * -(-self.total_size // self.remaining)
        return iter(filled[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
