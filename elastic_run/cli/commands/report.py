"""``elastic-run report LOGDIR``: one HTML page of a job's history, made of its event logs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from io import TextIOWrapper

from elastic_run.cli.commands import CommandParser, argument
from elastic_run.files import replace_file
from elastic_run.notices import UsageError, escape_unprintable, print_text
from elastic_run.report.history_page import render_page
from elastic_run.report.job_history import fold, read_logs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.report.job_history import Job, Logs

_PAGE = "report.html"
_STDOUT = "-"

ARGUMENTS = {
    "report": [
        argument("logs", metavar="LOGDIR", help="a log directory, the directory of one run, or an event log"),
        argument(
            "-o", "--output", metavar="FILE", help="file to write, or - for stdout (default: report.html in LOGDIR)"
        ),
        argument("--run", metavar="ID", help="id of the job (default: the job that began last)"),
    ]
}


def run_report(words: Sequence[str]) -> int:
    """Write the page."""
    arguments = CommandParser("report").parse_args(words)
    if find_spec("jinja2") is None:
        message = "needs jinja2: pip install 'elastic-run[report]'"
        raise UsageError(message)
    place = arguments.logs
    try:
        logs = read_logs(place)
    except OSError as error:
        message = f"{place!r} can't be read: {error.strerror}"
        raise UsageError(message) from None
    jobs = fold(logs.events)
    job = _choose(jobs, arguments.run, place, logs)
    page = render_page(job, logs, [other.run_id for other in jobs if other is not job])
    if arguments.output == _STDOUT:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # as the page says, and as in a file
        print_text(page)
        return 0
    directory = place if os.path.isdir(place) else os.path.dirname(place)
    path = arguments.output or os.path.join(directory, _PAGE)
    try:
        _write(path, page.encode("utf-8", "replace"), is_named=bool(arguments.output))
    except OSError as error:
        message = f"{path!r} can't be written: {error.strerror} (-o chooses another file)"
        raise UsageError(message) from None
    print_text(f"{escape_unprintable(path)}\n")
    return 0


def _choose(jobs: list[Job], run_id: str | None, place: str, logs: Logs) -> Job:
    chosen = [job for job in jobs if run_id in (None, job.run_id)]
    if chosen:
        return chosen[-1]
    if jobs:
        ids = sorted({job.run_id for job in jobs})
        message = f"--run: no job {run_id!r} in {place!r}; there are {', '.join(ids[:10])}{', ...' if ids[10:] else ''}"
    elif logs.mistakes:
        wrong = logs.mistakes[0]
        message = f"no event in {wrong.file!r}: line {wrong.first_line} {wrong.reason}"
    elif logs.problems:
        message = logs.problems[0]
    else:
        what = f"{logs.files[0]!r} is empty" if logs.files else f"no events.jsonl in or below {place!r}"
        message = f"{what}: a job writes it with --log-dir"
    raise UsageError(message)


def _write(path: str, page: bytes, *, is_named: bool) -> None:
    """Write the page; a device or a pipe is written to, since a file would take its place for all programs.

    A link that the user names is followed. Another one is replaced: another user may have put it into the directory.
    """
    is_taken_as_it_is = is_named or not os.path.islink(path)
    if is_taken_as_it_is and os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(page)
    else:
        replace_file(os.path.realpath(path) if is_named else path, page)
