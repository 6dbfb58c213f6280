"""The nodes that the job has refused, and the clauses about them that waiting nodes show."""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.state import REFUSED, Gone, name_host
from elastic_run.core.protocol.messages import Join
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.state import Job, Node


def note_refused(job: Job, name: str) -> Job:
    """Return the state in which a refused node has the number of the slot that refuses it."""
    gone = job.gone.get(name)
    if gone is None or gone.reason != REFUSED:
        return job
    return replace(job, gone=MappingProxyType({**job.gone, name: replace(gone, refused_in=job.slot)}))


def has_missed_refusal(known: Node | Gone, event: object) -> bool:
    """Whether a refused node has never read its refusal: it read so slowly that the slot was trimmed before."""
    return isinstance(event, Join) and isinstance(known, Gone) and 0 <= known.refused_in <= event.seen


def forget_refused(gone: dict[str, Gone], host: str | None = None) -> None:
    """Mark the refused nodes of a host as told, because another node of the host has joined; None marks all hosts."""
    for name, node in gone.items():
        if node.reason == REFUSED and host in (None, name_host(node)):
            gone[name] = replace(node, is_told=True)


def describe_refused(job: Job, limit: int) -> tuple[str, ...]:
    """Return a clause for each node that was refused since the last round was formed, the latest first."""
    refused = [gone for gone in job.gone.values() if gone.reason == REFUSED and not gone.is_told]
    clauses = dict.fromkeys(f"{name_host(gone)} (refused: {gone.detail})" for gone in reversed(refused))
    return tuple(clauses)[:limit]
