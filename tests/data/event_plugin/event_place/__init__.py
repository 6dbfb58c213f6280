"""A package that brings a handler of events, as a site would write it."""

from __future__ import annotations

import logging
import os
from pathlib import Path


class ToFile(logging.Handler):
    """Appends each event to the file that EVENT_FILE names."""

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        with Path(os.environ["EVENT_FILE"]).open("a", encoding="utf-8") as file:
            file.write(self.format(record) + "\n")


class Failing(logging.Handler):
    """Raises on every event, as one does whose collector has gone."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise."""
        message = f"no collector for {record.name}"
        raise ConnectionError(message)


def broken() -> logging.Handler:
    """Fail as a plug-in does whose own needs are not installed."""
    message = "no module of the site's"
    raise ImportError(message)
