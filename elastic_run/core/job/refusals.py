"""The nodes that a job has refused, among those that are gone: what the nodes that wait are told of them."""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.state import REFUSED, Gone, name_host
from elastic_run.core.protocol.messages import Join
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.state import Job, Node


def note_refused(job: Job, name: str) -> Job:
    """Return the state with a note that a node is refused in this slot."""
    gone = job.gone.get(name)
    if gone is None or gone.reason != REFUSED:
        return job
    return replace(job, gone=MappingProxyType({**job.gone, name: replace(gone, refused_in=job.slot)}))


def has_missed_refusal(known: Node | Gone, event: object) -> bool:
    """Whether a node that was refused has passed over the slot that says so: it read so slowly that it was trimmed."""
    return isinstance(event, Join) and isinstance(known, Gone) and 0 <= known.refused_in <= event.seen


def forget_refused(gone: dict[str, Gone], host: str | None = None) -> None:
    """Tell no more of nodes that were refused on a host, where another one has come, or on any host."""
    for name, node in gone.items():
        if node.reason == REFUSED and host in (None, name_host(node)):
            gone[name] = replace(node, is_told=True)


def describe_refused(job: Job, limit: int) -> tuple[str, ...]:
    """Return a clause for each node that was refused since the last round was formed, the latest first."""
    refused = [gone for gone in job.gone.values() if gone.reason == REFUSED and not gone.is_told]
    clauses = dict.fromkeys(f"{name_host(gone)} (refused: {gone.detail})" for gone in reversed(refused))
    return tuple(clauses)[:limit]
