"""``elastic-run top [RUN]``: the table of ``elastic-run status``, drawn again and again until the job ends."""

from __future__ import annotations

import os
import sys
import time

from elastic_run import contract
from elastic_run.cli.commands.nodes import JOB_STATUS, ask_nodes
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.stdout import replace_unknown
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.status_table import render_status
from elastic_run.report.text import shows_colors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from elastic_run.control.jobs import RunningJob

#: Seconds between two tables, unless the user says otherwise, and at least: the agent measures for 0.1 s.
_INTERVAL = 1.0
_SHORTEST = 0.2


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("top")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--interval",
        type=float,
        default=_INTERVAL,
        metavar="SECONDS",
        help=f"seconds between two updates (default: {_INTERVAL:g})",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Show a job until it ends, or until Ctrl-C.

    Returns:
        0.

    Raises:
        UsageError: There is no such job, there are several, or this is no terminal.
        SystemExit: The help was printed (0).
    """
    args = make_parser().parse_args(words)
    if not _SHORTEST <= args.interval <= contract.LONGEST_WAIT:
        message = f"--interval: {args.interval} must be {_SHORTEST} or more seconds"
        raise UsageError(message)
    try:
        from rich.live import Live
    except ImportError:
        message = "it needs rich: pip install 'elastic-run[live]' (`elastic-run status` prints the same once)"
        raise UsageError(message) from None
    if not sys.stdout.isatty():
        message = "standard output is not a terminal (`elastic-run status` prints the same once)"
        raise UsageError(message)
    job = find_job(os.environ, args.run)
    replace_unknown()
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while (text := _draw(job, live.console.width)) is not None:
                live.update(text, refresh=True)
                time.sleep(args.interval)
    except KeyboardInterrupt:
        return contract.EXIT_SUCCESS
    say(f"job {job.label} has ended")
    return contract.EXIT_SUCCESS


def _draw(job: RunningJob, width: int) -> Text | None:
    """Return the table as it is now, or None where no agent of the job is there any more."""
    from rich.text import Text

    nodes, errors = ask_nodes(job, JOB_STATUS)
    if not nodes:
        return Text("\n".join(errors)) if errors else None
    lines = render_status(nodes, label=job.label, width=width, color=shows_colors(1, os.environ))
    return Text.from_ansi("\n".join([*lines, *errors]))
