"""The log level of the launcher's own loggers."""

from __future__ import annotations

__all__ = ["get_log_level"]


def get_log_level() -> str:
    """Return the name of the level that holds where LOGLEVEL is not set."""
    return "WARNING"
