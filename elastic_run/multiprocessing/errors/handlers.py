"""Which error handler `record` uses."""

from __future__ import annotations

from elastic_run.multiprocessing.errors.error_handler import ErrorHandler


def get_error_handler() -> ErrorHandler:
    """Return the error handler of this process.

    Returns:
        A new handler.
    """
    return ErrorHandler()
