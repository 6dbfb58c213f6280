"""Which nodes of a job are there, for the lines that waiting nodes show, and without which it goes on, for `status`."""

from __future__ import annotations

from elastic_run.core.job import formation
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.ranks import describe_missing_ranks
from elastic_run.core.job.round_outcome import describe_lost, describe_refused
from elastic_run.core.job.round_policy import SHOWN, list_present
from elastic_run.core.job.state import GATHERING
from elastic_run.core.job.succession import MAJORITY, describe_majority
from elastic_run.core.protocol.outcomes import UNHEALTHY
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.job.coordination_state import Coordination
    from elastic_run.core.job.state import Job

#: Nodes that `list_left_out` names.
_MOST = 32


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


def list_left_out(job: Job, now: float) -> list[dict[str, Any]]:
    """Return what the user needs to know of each node that the job goes on without, the latest last.

    The documents have `host`, `kind` (`excluded` or `unhealthy`), `reason` (a clause), `seconds` since then, and
    `expires` (seconds until the machine may join again). The last two are None where they are not known; an exclusion
    without `expires` lasts as long as the job.
    """
    window = None if job.config is None else job.config.exclude_after
    period = None if window is None else window.seconds
    found: list[dict[str, Any]] = []
    for one in job.exclusions:
        expires = None if period is None else one.at + period - now
        if expires is None or expires > 0:
            about = {"host": one.host, "kind": "excluded", "reason": one.reason}
            found.append({**about, "seconds": now - one.at, "expires": expires})
    hosts = {node.node_info.host for node in job.nodes.values()}
    for gone in job.gone.values():
        if gone.reason == UNHEALTHY and gone.was is not None and gone.was.node_info.host not in hosts:
            reason = gone.detail.removeprefix(UNHEALTHY).removeprefix(": ")
            about = {"host": gone.was.node_info.host, "kind": UNHEALTHY, "reason": reason}
            found.append({**about, "seconds": None, "expires": None})
    return found[-_MOST:]
