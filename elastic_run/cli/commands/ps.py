"""``elastic-run ps``: the jobs of this user that run on this machine, as ``status`` without RUN lists several jobs."""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.stdout import print_text
from elastic_run.control.jobs import NO_JOB, find_jobs, name_job
from elastic_run.report.text import columns, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.control.jobs import RunningJob

_HEADINGS = ("RUN", "PID", "STATE", "STARTED", "PROGRAM")


def make_parser() -> CommandParser:
    """Return the parser of the arguments: there are none."""
    return CommandParser("ps")


def main(words: Sequence[str]) -> int:
    """Print a row for each job.

    Returns:
        0, also if there is no job.

    Raises:
        UsageError: The directory of the control sockets belongs to another user.
        SystemExit: The help was printed (0).
    """
    make_parser().parse_args(words)
    print_jobs(find_jobs(os.environ))
    return contract.EXIT_SUCCESS


def print_jobs(jobs: Sequence[RunningJob]) -> None:
    """Print a row for each job, the oldest first."""
    table = [_HEADINGS, *(_make_row(job, jobs) for job in jobs)]
    widths = [max(columns(row[index]) for row in table) for index in range(len(_HEADINGS))]
    rows = [[text + " " * (width - columns(text)) for text, width in zip(row, widths, strict=True)] for row in table]
    print_text("\n".join("  ".join(row).rstrip() for row in rows) + "\n" if jobs else f"{NO_JOB}\n")


def _make_row(job: RunningJob, jobs: Sequence[RunningJob]) -> tuple[str, ...]:
    first = job.agents[0]
    if first.error:
        return (name_job(job, jobs), str(first.pid), "no answer", "-", printable(first.error))
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.started_at))
    pids = ",".join(str(agent.pid) for agent in job.agents)
    return (printable(name_job(job, jobs)), pids, printable(first.state), started, printable(first.program))
