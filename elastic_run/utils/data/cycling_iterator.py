"""Several epochs of data as one iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CyclingIterator"]

_T = TypeVar("_T")


class CyclingIterator(Iterator[_T]):
    """Go through the data of one epoch after the other: ``[1, 2]`` with ``n=2`` gives 1, 2, 1, 2.

    Args:
        n: The epoch before which to end.
        generator_fn: Returns the data of an epoch, called with the epoch's number.
        start_epoch: The first epoch; it is opened at once.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[_T]], start_epoch: int = 0) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._iter = generator_fn(start_epoch)

    def __iter__(self) -> CyclingIterator[_T]:
        return self

    def __next__(self) -> _T:
        while True:
            try:
                return next(self._iter)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            # A loop and not a recursion as in torch, which ends in RecursionError after a thousand empty epochs.
            self._epoch += 1
            self._iter = self._generator_fn(self._epoch)
