"""torch's `Std`; a file of its own because starting workers needs no `enum`: there plain numbers do."""

from __future__ import annotations

from enum import IntFlag

from elastic_run.multiprocessing.output.logs import parse_streams, streams_by_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.output.logs import Streams


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
