"""A place to log more of timers that expired: torch's name, for sites that put their own function there."""

from __future__ import annotations

import logging

from elastic_run import lazy_names

__all__ = ["log_debug_info_for_expired_timers"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "get_logger": "elastic_run.utils.logging",
    },
)

logger = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log timers that have expired.

    Args:
        run_id: Id of the job.
        expired_timers: The requests as JSON, by pid.
    """
    if expired_timers:
        logger.info("job %s: these timers expired: %s", run_id, expired_timers)
