"""Reading the event logs that launchers of a test have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.report.history_logs import read_events
from elastic_run.report.job_history import fold

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.report.job_history import Event, Job


def read_whole(path: Path) -> list[Event]:
    """Return the events of a log in which every line fits the schema."""
    with path.open("rb") as file:
        events, mistakes = read_events(file, path.name)
    assert mistakes is None, mistakes
    return events


def read_job(log_dir: Path) -> Job:
    """Return the one job whose launchers have written into a log directory."""
    events = [event for path in sorted(log_dir.glob("*/events.jsonl")) for event in read_whole(path)]
    (job,) = fold(events)
    return job
