"""The nodes that the job goes on without, for `elastic-run status`: excluded machines and unhealthy nodes.

Pure. Only the coordinator knows them; its node tells them in its answer.
"""

from __future__ import annotations

from elastic_run.core.protocol.outcomes import UNHEALTHY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.job.state import Job

__all__ = ["list_left_out"]

#: Nodes that an answer names.
_MOST = 32


def list_left_out(job: Job, now: float) -> list[dict[str, Any]]:
    """Return what the user needs to know of each node, the latest last.

    Args:
        job: The coordinator's state of the job.
        now: Monotonic seconds of this process.

    Returns:
        Documents with `host`, `kind` (`excluded` or `unhealthy`), `reason` (a clause), `seconds` since then, and
        `expires` (seconds until the machine may join again). The last two are None where they are not known; an
        exclusion without `expires` lasts as long as the job.
    """
    window = None if job.config is None else job.config.exclude_after
    period = None if window is None else window.seconds
    found: list[dict[str, Any]] = []
    for one in job.exclusions:
        expires = None if period is None else one.at + period - now
        if expires is None or expires > 0:
            found.append(_describe(one.host, "excluded", one.reason, seconds=now - one.at, expires=expires))
    hosts = {node.node_info.host for node in job.nodes.values()}
    for gone in job.gone.values():
        if gone.reason == UNHEALTHY and gone.was is not None and gone.was.node_info.host not in hosts:
            reason = gone.detail.removeprefix(UNHEALTHY).removeprefix(": ")
            found.append(_describe(gone.was.node_info.host, UNHEALTHY, reason, seconds=None, expires=None))
    return found[-_MOST:]


def _describe(host: str, kind: str, reason: str, *, seconds: float | None, expires: float | None) -> dict[str, Any]:
    return {"host": host, "kind": kind, "reason": reason, "seconds": seconds, "expires": expires}
