"""The collectives of a rank, as torch's flight recorder in its process has recorded them.

Pure. The recorder is a ring: the newest entries overwrite the oldest.
"""

from __future__ import annotations

from elastic_run.records import dataclass

#: States of a collective. gloo doesn't record whether a collective has ended well: RETIRED is also a failed one.
OPEN = "open"
STARTED = "started"
RETIRED = "retired"
COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective, or of send or recv, on one rank.

    Args:
        record: Number of the entry in the recorder, from 0.
        group: Name of the process group.
        description: Description of the process group, or "".
        sequence: Number of the collective in its group, as all ranks of the group count.
        operation: Its name, such as `all_reduce`.
        state: `OPEN`, `STARTED` (its kernel runs), `RETIRED` or `COMPLETED`.
        input_sizes: Shape of each input tensor.
        output_sizes: Shape of each output tensor.
        input_types: Element type of each input tensor.
        output_types: Element type of each output tensor.
        where: The innermost line of the user's own code, `train.py:88 in step`, or "".
        source: Sender of a send or recv, as its number in the group; -1 for collectives, and for a recv from any rank.
        target: Receiver of a send or recv, as its number in the group; -1 for collectives.
        library: Name of the backend that performs it, such as `nccl2`: each numbers its own calls in a group.
    """

    record: int
    group: str
    description: str
    sequence: int
    operation: str
    state: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    where: str = ""
    source: int = -1
    target: int = -1
    library: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the rank still waits for it."""
        return self.state in (OPEN, STARTED)

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a recv."""
        return self.target >= 0


@dataclass(frozen=True, slots=True)
class Dump:
    """The content of one rank's flight recorder.

    Args:
        rank: The rank in the job.
        collectives: The collectives in the order of their calls.
        members: Ranks of each process group that the dump lists, by the group's name.
        source: The file.
    """

    rank: int
    collectives: tuple[Collective, ...]
    members: dict[str, tuple[int, ...]]
    source: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the ring still holds the rank's first collective."""
        return not self.collectives or self.collectives[0].record == 0
