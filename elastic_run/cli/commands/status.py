"""``elastic-run status [RUN]``: the state of a running job and of each of its workers."""

from __future__ import annotations

import os
import shutil

from elastic_run import contract
from elastic_run.cli.commands.nodes import JOB_STATUS, ask_nodes
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.commands.ps import print_jobs
from elastic_run.cli.stdout import print_json, print_text
from elastic_run.control.jobs import RUN_HELP, choose_job, find_jobs
from elastic_run.control.wire import VERSION
from elastic_run.notices import say
from elastic_run.report.status_table import find_left_out, render_status
from elastic_run.report.text import shows_colors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("status")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return parser


def main(words: Sequence[str]) -> int:
    """Print the state of a job.

    Returns:
        0, also for a list of several jobs if none is named; 1 if no agent of the job answers.

    Raises:
        UsageError: There is no such job, it doesn't answer, or there are several for --json.
        SystemExit: The help was printed (0).
    """
    args = make_parser().parse_args(words)
    jobs = find_jobs(os.environ)
    if args.run is None and len(jobs) > 1 and not args.json:
        print_jobs(jobs)
        return contract.EXIT_SUCCESS
    job = choose_job(jobs, args.run)
    nodes, errors = ask_nodes(job, JOB_STATUS)
    for error in errors:
        say(error)
    if not nodes:
        return contract.EXIT_FAILURE
    if args.json:
        print_json({"version": VERSION, "run": job.label, "left_out": find_left_out(nodes), "nodes": nodes})
        return contract.EXIT_SUCCESS
    lines = render_status(
        nodes,
        label=job.label,
        width=shutil.get_terminal_size().columns,
        color=shows_colors(1, os.environ),
    )
    print_text("\n".join(lines) + "\n")
    return contract.EXIT_SUCCESS
