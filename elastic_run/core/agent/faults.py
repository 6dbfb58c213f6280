"""Faults that a user asks for, to try what a job does then: which fault, in which worker, when.

Pure. The same faults and the same seed give the same worker and the same moment at each run and on each node.
"""

from __future__ import annotations

import zlib

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


#: The faults that a worker makes in its own process, each with its description for the user.
ACTIONS = {
    "raise": "exception in the main thread",
    "raise-in-thread": "exception in another thread",
    "exit": "exit",
    "sleep": "endless sleep of the main thread",
    "hold-gil": "GIL held for ever by the main thread",
    "oom": "memory taken until the OOM killer acts",
}
#: The faults that the agent makes, beside its signals.
AGENT_ACTIONS = frozenset(("agent", "freeze"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    signal: int  # The signal that the worker gets; 0 if there is an `action`
    after: float = 0.0  # Seconds from the start of the workers to the fault, at least
    before: float = 0.0  # Seconds from the start of the workers to the fault, at most; the seed chooses the moment
    rank: int | None = 0  # Global rank of the worker; None if the seed chooses the worker
    attempt: int | None = 0  # Number of restarts before it; None for every attempt
    pause: float = 0.0  # Seconds after which a stopped worker, or a frozen node, goes on; 0 for never
    seed: int = 0  # Decides all random choices
    #: The fault that the worker makes in its own process, one of `ACTIONS`, or the agent, one of `AGENT_ACTIONS`; with
    #: a value behind `exit`; or ""
    action: str = ""

    @property
    def is_of_worker(self) -> bool:
        """Whether the worker makes it in its own process."""
        return self.action.partition(" ")[0] in ACTIONS


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault of one attempt, with what the seed has chosen."""

    fault: Fault  # The fault
    rank: int  # Global rank of the worker
    delay: float  # Seconds from the start of the workers


def plan_faults(faults: Sequence[Fault], *, attempt: int, world_size: int) -> list[PlannedFault]:
    """Return the faults of an attempt, without faults of ranks that the round does not have.

    `faults` are all of the job, the same on each node; `attempt` is the number of restarts so far.
    """
    planned = []
    for index, fault in enumerate(faults):
        if fault.attempt not in {None, attempt}:
            continue
        rank = fault.rank
        if rank is None:
            rank = int(_draw(fault.seed, index, attempt, "rank") * world_size)
        if rank < world_size:
            span = fault.before - fault.after
            planned.append(PlannedFault(fault, rank, fault.after + span * _draw(fault.seed, index, attempt, "time")))
    return planned


def _draw(*words: object) -> float:
    """Return a number from 0 to below 1 that is always the same for the same words."""
    return zlib.crc32(" ".join(map(str, words)).encode()) / 2**32
