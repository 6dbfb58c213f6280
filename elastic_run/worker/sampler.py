"""A sampler that goes on in the middle of an epoch, with another number of workers than before.

An epoch is one order of all samples, made from seed and epoch alone. Rank r of n takes the samples r, r+n, r+2n, … of
what is left of it. All ranks take equally many in each step, so what has been taken is always a beginning of that
order, and one number says how long it is: any number of ranks can go on from it. A DataLoader with workers has drawn
far more from the sampler than the loop took, so `track` counts the batches as it hands them to the loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import Sampler

from elastic_run.worker.distributed import rank as own_rank
from elastic_run.worker.distributed import world_size as own_world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader, Dataset

__all__ = ["ElasticSampler"]

_T = TypeVar("_T")
_TAILS = ("once", "pad", "drop", "uneven")


class ElasticSampler(Sampler[int]):
    """Share out a data set among the ranks, each sample once per epoch, whatever becomes of their number.

    Args:
        data: The data set, or its number of samples.
        shuffle: Whether each epoch has an order of its own; otherwise it is the data set's.
        seed: Of the order; with the epoch's number added. The same on all ranks.
        tail: What becomes of the last samples of an epoch, when they can't be shared out equally. "once": each is taken
            once, so that the last batch of some ranks is smaller by one; only a rank that would miss the last step
            takes one a second time. "pad": all ranks take equally many, some of them a second time, fewer than there
            are ranks. "drop": they are left out. "uneven": each is taken exactly once; some ranks may have one batch
            less, and collectives of the loop must allow for that.
        rank: Of this worker; None to find out.
        world_size: How many workers there are; None to find out.

    Raises:
        TypeError: The data set has no length.
        ValueError: `tail` is none of these, or the rank isn't below the world size.
    """

    def __init__(
        self,
        data: Dataset[Any] | Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: Literal["once", "pad", "drop", "uneven"] = "once",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if isinstance(data, bool) or not isinstance(data, int | Sized):
            message = f"the data set of type {type(data).__name__} has no length"
            raise TypeError(message)
        if tail not in _TAILS:
            message = f"tail={tail!r} is none of {', '.join(map(repr, _TAILS))}"
            raise ValueError(message)
        self._size = data if isinstance(data, int) else len(data)
        self._shuffle = shuffle
        self._seed = seed
        self._tail = tail
        self._rank = own_rank() if rank is None else rank
        self._world_size = own_world_size() if world_size is None else world_size
        if not 0 <= self._rank < self._world_size:
            message = f"rank={self._rank} is not below world_size={self._world_size}"
            raise ValueError(message)
        self._epoch = 0
        self._consumed = 0
        self._is_uncounted = False
        self._is_through = False
        #: How the loader makes batches, as `track` finds out; without one each sample is a step.
        self._batch_size = 1
        self._is_last_dropped = False

    @property
    def epoch(self) -> int:
        """The number of the epoch that runs, or runs next."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch all ranks together have taken."""
        return self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. It goes on where it was if it is the one that runs, as after `load_state_dict`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._consumed = 0
            self._is_through = False

    def __len__(self) -> int:
        """Return how many samples of this epoch are left for this rank."""
        left, ranks = self._size - self._consumed, self._world_size
        fewest, most, own = left // ranks, -(-left // ranks), -(-(left - self._rank) // ranks)
        if self._tail == "drop":
            return fewest
        if self._tail == "uneven":
            return own
        size = self._batch_size
        steps = [samples // size if self._is_last_dropped else -(-samples // size) for samples in (own, most)]
        return own if self._tail == "once" and steps[0] == steps[1] else most

    def __iter__(self) -> Iterator[int]:
        self._is_uncounted = True
        # A tensor as long as can be: a list of numbers takes five times its memory, on every rank of a node.
        left = self._order()[self._consumed :]
        size = len(left)
        own = left[self._rank :: self._world_size][: len(self)].tolist()
        if len(own) < len(self):
            place = self._rank + len(own) * self._world_size
            own.append(int(left[place % size]))
        return iter(own)

    def advance(self, count: int) -> None:
        """Note that each rank has taken so many samples more: for loops that can't use `track`.

        Args:
            count: The batch size, also for a last batch that is smaller.
        """
        self._is_uncounted = False
        self._consumed = min(self._consumed + count * self._world_size, self._size)

    def track(self, loader: DataLoader[_T]) -> Iterator[_T]:
        """Go through what is left of the epoch, and count what was handed to the loop.

        A batch counts when the loop gets it: `state_dict`, called behind the optimizer's step, includes it. To go
        through an epoch a second time gives nothing, and a warning.

        Args:
            loader: Made with this sampler; its workers may be as far ahead as they like.

        Raises:
            ValueError: The loader has another sampler, or makes batches in a way of its own.
        """
        if self._is_through and self._size:
            message = f"epoch {self._epoch} is used up, nothing is left of it: call set_epoch({self._epoch + 1}) first"
            warnings.warn(message, stacklevel=2)
        batches = loader.batch_sampler
        if (loader.sampler if batches is None else getattr(batches, "sampler", None)) is not self:
            message = "the loader does not use this sampler: DataLoader(…, sampler=sampler)"
            raise ValueError(message)
        self._batch_size = int(getattr(batches, "batch_size", 1))
        self._is_last_dropped = getattr(batches, "drop_last", False)
        try:
            for batch in loader:
                self.advance(self._batch_size)
                yield batch
        finally:
            self._batch_size, self._is_last_dropped = 1, False
        self._is_uncounted = False
        self._is_through = True
        self._consumed = self._size

    def state_dict(self) -> dict[str, int | bool]:
        """Return where the epoch is: the same on every rank between two steps, so one rank may save it for all.

        It warns when samples were handed out but not counted: a job that goes on from there takes them again.
        """
        if self._is_uncounted:
            message = "the progress of ElasticSampler is not counted: loop over track(loader), or call advance()"
            warnings.warn(message, stacklevel=2)
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "seed": self._seed,
            "size": self._size,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state says, with its seed.

        Args:
            state: From `state_dict`, written by any number of ranks.

        Raises:
            ValueError: It is of a data set of another size or in another order, or no such state.
        """
        try:
            loaded = {name: int(state[name]) for name in ("epoch", "consumed", "seed", "size", "shuffle")}
        except (KeyError, TypeError, ValueError):
            message = f"the state was not written by ElasticSampler.state_dict: {state!r:.200}"
            raise ValueError(message) from None
        if loaded["size"] != self._size:
            message = f"the state is of a data set of {loaded['size']} samples, this one has {self._size}"
            raise ValueError(message)
        if bool(loaded["shuffle"]) != self._shuffle:
            message = f"the state was written with shuffle={bool(loaded['shuffle'])}, this sampler has {self._shuffle}"
            raise ValueError(message)
        self._epoch, self._consumed, self._seed = loaded["epoch"], loaded["consumed"], loaded["seed"]
        self._is_through = False

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._size)
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(self._size, generator=generator)
