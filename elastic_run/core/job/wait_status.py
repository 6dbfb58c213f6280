"""Which nodes of a job are there, for the lines that waiting nodes show."""

from __future__ import annotations

from elastic_run.core.job import formation
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.ranks import describe_missing_ranks
from elastic_run.core.job.round_outcome import describe_lost, describe_refused
from elastic_run.core.job.round_policy import SHOWN, list_present
from elastic_run.core.job.state import GATHERING
from elastic_run.core.job.succession import MAJORITY, describe_majority
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.coordination_state import Coordination


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """The nodes that are there.

    Args:
        phase: Of the job.
        round: The last round that was formed, 0 for none.
        min_nodes: Of the configuration.
        max_nodes: Of the configuration.
        present: The number of nodes there.
        hosts: Their host names, or ranges of them (`host_lists`), while nodes are waited for; otherwise none.
        lost: What happened to those that are missing, or why they were refused, a clause each.
        seconds_left: Until the job ends for want of nodes, or starts with those that are there; None if neither.
        missing: How many nodes of an earlier round, or which fixed node ranks, are needed before a round may form; ""
            if no node in particular is.
        starts: Whether the job starts after `seconds_left`.
    """

    phase: str
    round: int
    min_nodes: int
    max_nodes: int
    present: int
    hosts: tuple[str, ...]
    lost: tuple[str, ...]
    seconds_left: float | None
    missing: str = ""
    starts: bool = False


def describe_wait(coordination: Coordination, now: float) -> WaitStatus:
    """Return which nodes are there, and which are needed."""
    job = coordination.job
    config = job.config or JobConfig(1, 1)
    left, missing, ends = None, "", None
    if job.phase == GATHERING:
        missing = describe_missing_seats(coordination) or describe_missing_ranks(job, config)
        ends = formation.last_call_ends(job, config)
        left = max(0.0, (job.waits_since + config.join_timeout if ends is None else ends) - now)
    return WaitStatus(
        phase=job.phase,
        round=job.round,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        present=len(job.nodes),
        hosts=list_present(job) if job.phase == GATHERING else (),
        lost=(*describe_lost(job, SHOWN), *describe_refused(job, SHOWN)),
        seconds_left=left,
        missing=missing,
        starts=ends is not None,
    )


def describe_missing_seats(coordination: Coordination) -> str:
    """Say how many nodes of an earlier round are missing before another may form; "" if none are, or none count."""
    if coordination.choice != MAJORITY:
        return ""
    return describe_majority(coordination.knowledge, set(coordination.here))
