"""What can go wrong for a worker before it trains. The class says whose fault it is."""

from __future__ import annotations

__all__ = ["JoinError", "PlaceError", "WorkerError"]


class WorkerError(Exception):
    """The root of this package's own errors."""


class PlaceError(WorkerError, ValueError):
    """The environment doesn't say which worker this is, or contradicts itself."""


class JoinError(WorkerError, RuntimeError):
    """The workers didn't come together: one is missing, or can't be reached."""
