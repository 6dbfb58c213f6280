"""The job's state as a document, for the node that coordinates next.

Times are relative to the moment of writing, so that another node's clock can go on from there (law 4).
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.role_scripts import RoleScript  # noqa: TC001 - importing it registers it as a field
from elastic_run.core.job.state import PHASES, Exclusion, Gone, Incident, Job, LeftLog, Node, Refusal, Root, Seat
from elastic_run.core.protocol.codec import Document, MessageError, from_document, register, to_document
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.agent.restart_policy import Failure
    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.messages import Copy


@register
@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A `Job` in JSON's types, with times relative to the moment of writing."""

    term: int
    phase: str
    config: JobConfig | None
    nodes: tuple[Node, ...]
    gone: tuple[Gone, ...]
    order: int
    round: int
    round_id: str
    highest_round: int
    formed_slot: int
    seats: tuple[Seat, ...]
    restart_count: int
    since: float
    min_reached_at: float | None
    until: float | None
    news: str
    root: Root | None
    hidden: Root | None
    ending: Root | None
    refusals: tuple[Refusal, ...]
    failures: tuple[Failure, ...]
    restart_times: tuple[float, ...]
    changes: tuple[float, ...]
    attempts: tuple[Document, ...]
    incarnation: str = ""
    store_id: str = ""
    scripts: tuple[RoleScript, ...] = ()
    rank_claims: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()
    preparation: Copy | None = None
    left_logs: tuple[LeftLog, ...] = ()
    round_restarts: int = 0
    incidents: tuple[Incident, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    slot: int = 0


def job_to_document(job: Job, now: float) -> Document:
    """Return the job's state for a successor, in JSON's types."""
    job = _shift(job, -now)
    names = (name for name in _Snapshot.__slots__ if name not in ("nodes", "gone"))
    values = {name: getattr(job, name) for name in names}
    return to_document(_Snapshot(nodes=tuple(job.nodes.values()), gone=tuple(job.gone.values()), **values))


def job_from_document(document: object, now: float) -> Job:
    """Return the state that a coordinator before left.

    Returns:
        The state, as if no time had passed since.

    Raises:
        MessageError: It is garbage.
    """
    snapshot = from_document(_Snapshot, document)
    if snapshot.phase not in PHASES:
        message = f"_Snapshot.phase: {snapshot.phase!r} is none of {', '.join(PHASES)}"
        raise MessageError(message)
    names = (name for name in _Snapshot.__slots__ if name not in ("nodes", "gone"))
    values = {name: getattr(snapshot, name) for name in names}
    nodes = MappingProxyType({node.node: node for node in snapshot.nodes})
    gone = MappingProxyType({gone.node: gone for gone in snapshot.gone})
    return _shift(Job(nodes=nodes, gone=gone, **values), now)


def _shift(job: Job, offset: float) -> Job:
    nodes = {name: replace(node, arrived_at=node.arrived_at + offset) for name, node in job.nodes.items()}
    return replace(
        job,
        nodes=MappingProxyType(nodes),
        since=job.since + offset,
        min_reached_at=None if job.min_reached_at is None else job.min_reached_at + offset,
        until=None if job.until is None else job.until + offset,
        restart_times=tuple(time + offset for time in job.restart_times),
        changes=tuple(time + offset for time in job.changes),
        incidents=tuple(replace(one, at=one.at + offset) for one in job.incidents),
        exclusions=tuple(replace(one, at=one.at + offset) for one in job.exclusions),
    )
