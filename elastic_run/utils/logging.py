"""Loggers whose level comes from LOGLEVEL."""

from __future__ import annotations

import logging
import os
import sys

from elastic_run.utils.log_level import get_log_level

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger with the level of the environment variable LOGLEVEL.

    Args:
        name: Its name; None for the name of the module that calls.

    Returns:
        The logger.

    Raises:
        ValueError: LOGLEVEL is not the name of a level.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - as logging does
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger
