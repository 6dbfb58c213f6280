"""The nodes that the job has refused, and the clauses about them that waiting nodes show."""

from __future__ import annotations

from elastic_run.core.job.host_lists import fold_clauses
from elastic_run.core.job.state import REFUSED, Gone, name_host
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.state import Job


def forget_refused(gone: dict[str, Gone]) -> None:
    """Mark all refused nodes as told."""
    for name, node in gone.items():
        if node.reason == REFUSED:
            gone[name] = replace(node, is_told=True)


def forget_replaced(gone: dict[str, Gone], host: str) -> None:
    """Mark one refused node of a host as told, because another node of the host has joined, probably in its place.

    Only one, the first: several nodes may have one host name, and the others are still missing.
    """
    refused = (node for node in gone.values() if node.reason == REFUSED and not node.is_told)
    replaced = next((node for node in refused if name_host(node) == host), None)
    if replaced is not None:
        gone[replaced.node] = replace(replaced, is_told=True)


def describe_refused(job: Job, limit: int) -> tuple[str, ...]:
    """Return clauses for the nodes that were refused since the last round was formed, the latest first."""
    refused = [gone for gone in job.gone.values() if gone.reason == REFUSED and not gone.is_told]
    reasons = dict.fromkeys((name_host(gone), f"refused: {gone.detail}") for gone in reversed(refused))
    return fold_clauses(tuple(reasons), limit)
