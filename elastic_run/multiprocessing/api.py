"""Torch's names for processes that are launched together; starting workers needs neither this module nor `enum`.

Source: torch 2.13, torch.distributed.elastic.multiprocessing.api.
"""

from __future__ import annotations

from enum import IntFlag

from elastic_run.multiprocessing.logs import parse_streams, streams_by_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any

    from elastic_run.multiprocessing.logs import Streams

__all__ = ["SignalException", "Std", "get_std_cm", "to_map"]


class SignalException(Exception):  # noqa: N818 - torch's name
    """The launcher was stopped by a signal.

    Args:
        msg: What happened.
        sigval: The signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class Std(IntFlag):
    """Standard streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read the value of --redirects or --tee.

        Args:
            vm: ``0`` to ``3`` for all workers, or a map of local ranks to those: ``0:3,12:1``.

        Returns:
            One value, or a value by local rank.

        Raises:
            ValueError: It is neither.
        """
        streams = parse_streams(vm)
        return cls(streams) if isinstance(streams, int) else {rank: cls(value) for rank, value in streams.items()}


def to_map(val_or_map: Streams, local_world_size: int) -> dict[int, Std]:
    """Give every local rank its value.

    Args:
        val_or_map: One value for all, or a map in which ranks may be missing.
        local_world_size: Number of ranks.

    Returns:
        A value for each rank; `Std.NONE` if the map does not have the rank.
    """
    streams = streams_by_rank(val_or_map, range(local_world_size))
    return {rank: Std(value) for rank, value in streams.items()}


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return a context in which a stream goes to a file.

    Args:
        std_rd: Path of the file; empty for none.
        redirect_fn: Makes the context from the path.

    Returns:
        The context, or one that does nothing where there is no file.
    """
    from contextlib import nullcontext

    return redirect_fn(std_rd) if std_rd else nullcontext()
