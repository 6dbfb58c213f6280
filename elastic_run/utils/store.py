"""Synchronization through a store: torch's functions for programs that have a `torch.distributed.Store`.

The launcher itself needs none of this; its own stores wait and agree in other ways. The keys are torch's, so that some
of the processes may call torch's functions. Different on purpose: the timeout is put back after an error, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    DistStoreError: type[RuntimeError]

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_COUNT = "/num_members"
_ALL_THERE = "/last_member"
_PRESENT = "/TRACE"
_TOLD = "/TRACING_GATE"
_ANYTHING = "there"
_MOST_MISSING = 16
#: Seconds for the second and later missing ranks: ranks that are there have said so during the wait for the first.
_MOMENT = timedelta(milliseconds=1)


def __getattr__(name: str) -> object:
    if name != "DistStoreError":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return _store_error()


def _store_error() -> type[Exception]:
    import torch

    error: type[Exception] = torch._C._DistStoreError  # noqa: SLF001 - its public name, torch.distributed's, is newer
    return error


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Give a store another timeout for a while.

    Args:
        store: The store.
        timeout: Seconds.
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Read the values that all ranks have set, and let rank 0 go last, since the store may be served by its process.

    Args:
        store: The store.
        rank: This process's rank.
        prefix: What the keys begin with; a rank follows.
        world_size: How many ranks there are.

    Returns:
        The values by rank.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{number}" for number in range(world_size)])
    gate = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([gate])
    return values


def synchronize(
    store: Any,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Exchange a value with all ranks; a prefix is good for one time.

    Args:
        store: The store.
        data: This rank's value.
        rank: This process's rank.
        world_size: How many ranks there are.
        key_prefix: What the keys begin with.
        timeout: Seconds to wait for the others.

    Returns:
        The values by rank.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until all ranks have come here; a prefix is good for one time.

    Args:
        store: The store.
        world_size: How many ranks there are.
        key_prefix: What the keys begin with.
        barrier_timeout: Seconds to wait for the others.
        rank: This process's rank; with it an error names the missing ranks.
        rank_tracing_decoder: Returns what to call a rank in that error, such as its host.
        trace_timeout: Seconds for finding the missing ranks.

    Raises:
        AssertionError: There is a decoder and no rank (torch's exception).
        torch.distributed.DistStoreError: Not all came in time.
    """
    if rank is None and rank_tracing_decoder is not None:
        message = "barrier: rank_tracing_decoder needs rank"
        raise AssertionError(message)
    with store_timeout(store, barrier_timeout):
        gate = _arrive(store, world_size, key_prefix)
        try:
            store.wait([gate])
        except _store_error() as error:
            if rank is None:
                raise
            name_of = rank_tracing_decoder or str
            missing = _find_missing(store, world_size, key_prefix, rank, name_of, timedelta(seconds=trace_timeout))
            if missing is None:
                raise
            message = (
                f"rank {rank} waited {barrier_timeout} s at the barrier {key_prefix!r} of {world_size} ranks; "
                f"missing_ranks=[{', '.join(missing)}]"
            )
            raise type(error)(message) from None


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """Count this rank, open the gate if it is the last, and return the gate's key."""
    gate = prefix + _ALL_THERE
    if store.add(prefix + _COUNT, 1) == world_size:
        store.set(gate, _ANYTHING)
    return gate


def _find_missing(
    store: Any,
    world_size: int,
    prefix: str,
    rank: int,
    name_of: Callable[[int], str],
    wait_limit: timedelta,
) -> list[str] | None:
    """Return the missing ranks, as rank 0 finds them; other ranks point to rank 0, or know nothing if it is missing."""
    store.set(f"{prefix}{rank}{_PRESENT}", _ANYTHING)
    if rank != 0:
        try:
            # Rank 0 begins when its own barrier has timed out, and takes its time.
            store.wait([prefix + _TOLD], store.timeout + wait_limit)
        except _store_error():
            return None
        return [f"<rank 0 ({name_of(0)}) knows>"]
    missing: list[str] = []
    for number in range(1, world_size):
        try:
            store.wait([f"{prefix}{number}{_PRESENT}"], _MOMENT if missing else wait_limit)
        except _store_error():
            missing.append(name_of(number))
        if len(missing) == _MOST_MISSING:
            break
    store.set(prefix + _TOLD, _ANYTHING)
    return missing
