"""Ends of workers and jobs, made up for the tests of the report, and the event logs that launchers have written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_run.core.failure.diagnose import explain
from elastic_run.core.failure.job_result import JobResult
from elastic_run.core.failure.root_cause import WorkerEnd, find_root_cause
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.report.failure_rules import built_in_rules
from elastic_run.report.job_history import fold, read_events

if TYPE_CHECKING:
    from elastic_run.report.job_history import Event, Job


STDERR = Path(__file__).parents[1] / "data" / "stderr"
#: 2026-11-20 10:11:12.047 UTC.
NOON = 1795169472.047
#: To read the file takes longer than most tests of a report.
RULES = built_in_rules()


def captured(name: str) -> str:
    """Return a captured stderr."""
    return (STDERR / f"{name}.txt").read_bytes().decode()


def worker_end(
    rank: int = 0, exitcode: int = 1, stderr: str = "", *, after: float = 0.0, **fields: object
) -> WorkerEnd:
    """Return how a worker ended, `after` seconds later than others."""
    values: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "role": "default",
        "host": "gpu07",
        "pid": 4700 + rank,
        "exitcode": exitcode,
        "ended_at": NOON + after,
        "uptime": 12.3 + after,
        "exception": parse_exception(stderr, exitcode=exitcode) if stderr else None,
        "stderr_tail": tuple(stderr.splitlines()[-20:]),
    }
    return WorkerEnd(**(values | fields))


def stopped(*ranks: int, exitcode: int = -15) -> tuple[WorkerEnd, ...]:
    """Return workers that the agent stopped."""
    return tuple(worker_end(rank, exitcode, after=0.03, was_stopped=True) for rank in ranks)


def result(*ends: WorkerEnd, **fields: object) -> JobResult:
    """Return the end of a job whose last attempt ended like that."""
    root = find_root_cause(ends)
    code = 0 if root is None else root.exitcode
    values: dict[str, Any] = {
        "verdict": "worker_failed",
        "exit_code": code if code >= 0 else 128 - code,
        "entrypoint": "train.py",
        "run_id": "job7",
        "root": root,
        "ends": ends,
        "world_size": max(1, len(ends)),
        "ended_at": NOON + 0.1,
    }
    return explained(JobResult(**(values | fields)))


def explained(job: JobResult) -> JobResult:
    """Return the end of a job with its causes and what helps."""
    return explain(job, RULES)


# --- event logs -------------------------------------------------------------------------------------------------------
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
