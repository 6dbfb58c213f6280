"""The states of a worker group, under torch's name; a module of its own because starting workers needs no `enum`."""

from __future__ import annotations

from enum import Enum


class WorkerState(str, Enum):
    """State of a worker group; the workers of a group change it together."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether workers in this state are processes that live."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)
