"""``elastic-run status``, ``ps`` and ``top``: the jobs on this machine, and the workers of a job on all its nodes.

``status`` prints the table of one job; ``top`` draws the same table again and again; ``ps`` lists the jobs. `ask_nodes`
also serves ``stacks``.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

from elastic_run import contract
from elastic_run.cli.commands import CommandParser
from elastic_run.control.client import NO_JOB, RUN_HELP, VERSION, ask_all, choose_job, find_job, find_jobs, name_job
from elastic_run.errors import UsageError
from elastic_run.notices import print_json, print_text, replace_unknown, say
from elastic_run.report.status_table import find_left_out, render_status
from elastic_run.report.text import columns, printable, shows_colors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rich.text import Text

    from elastic_run.control.client import RunningJob

_HEADINGS = ("RUN", "PID", "STATE", "STARTED", "PROGRAM")
#: Seconds between two tables of `top`, unless the user says otherwise, and at least: the agent measures for 0.1 s.
_INTERVAL = 1.0
_SHORTEST = 0.2
#: Seconds for an answer for all nodes: longer than an agent waits for the other nodes.
_ALL_NODES_LIMIT = {"nodes": 6.0, "job_stacks": 12.0}


def ask_nodes(job: RunningJob, *, of_node: str, of_job: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the agents of a job on this machine, and through one of them those on other machines.

    Args:
        job: The job.
        of_node: The request that an agent answers for its own node.
        of_job: The request that an agent answers for all nodes.

    Returns:
        The documents of the nodes by node rank, and why a node is missing.
    """
    first, *others = job.agents
    nodes: list[dict[str, Any]] = []
    errors: list[str] = []
    asked = list(job.agents)
    if first.max_nodes > 1:
        limit = _ALL_NODES_LIMIT[of_job]
        answer = next(iter(ask_all([first.path], of_job, wait_limit=limit)), None)
        if answer is not None and answer.document is not None:
            nodes = list(answer.document["nodes"])
            here = {node["pid"] for node in nodes if node["host"] == nodes[0]["host"]}
            asked = [agent for agent in others if agent.pid not in here]  # waiting nodes are asked less often
            missing, members = answer.document["missing"], answer.document["members"]
            errors = [f"{missing} of {members} nodes have not answered"] if missing else []
    for answer in ask_all([agent.path for agent in asked], of_node):
        if answer.document is not None:
            nodes.append(answer.document)
        else:
            errors.append(answer.error)
    nodes.sort(key=lambda node: (node.get("node_rank") is None, node.get("node_rank") or 0))
    return nodes, errors


# --- status ----------------------------------------------------------------------------------------------------------


def make_status_parser() -> CommandParser:
    """Return the parser of `elastic-run status`."""
    parser = CommandParser("status")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return parser


def run_status(words: Sequence[str]) -> int:
    """Print the state of a job, or the list of several jobs if none is named; 1 if no agent of the job answers."""
    args = make_status_parser().parse_args(words)
    jobs = find_jobs(os.environ)
    if args.run is None and len(jobs) > 1 and not args.json:
        _print_jobs(jobs)
        return contract.EXIT_SUCCESS
    job = choose_job(jobs, args.run)
    nodes, errors = ask_nodes(job, of_node="status", of_job="nodes")
    for error in errors:
        say(error)
    if not nodes:
        return contract.EXIT_FAILURE
    if args.json:
        print_json({"version": VERSION, "run": job.label, "left_out": find_left_out(nodes), "nodes": nodes})
    else:
        width = shutil.get_terminal_size().columns
        lines = render_status(nodes, label=job.label, width=width, color=shows_colors(1, os.environ))
        print_text("\n".join(lines) + "\n")
    return contract.EXIT_SUCCESS


# --- ps --------------------------------------------------------------------------------------------------------------


def make_ps_parser() -> CommandParser:
    """Return the parser of `elastic-run ps`, which takes no argument."""
    return CommandParser("ps")


def run_ps(words: Sequence[str]) -> int:
    """Print a row for each job of this user on this machine; 0, also if there is no job."""
    make_ps_parser().parse_args(words)
    _print_jobs(find_jobs(os.environ))
    return contract.EXIT_SUCCESS


def _print_jobs(jobs: Sequence[RunningJob]) -> None:
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


# --- top -------------------------------------------------------------------------------------------------------------


def make_top_parser() -> CommandParser:
    """Return the parser of `elastic-run top`."""
    parser = CommandParser("top")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    text = f"seconds between two updates (default: {_INTERVAL:g})"
    parser.add_argument("--interval", type=float, default=_INTERVAL, metavar="SECONDS", help=text)
    return parser


def run_top(words: Sequence[str]) -> int:
    """Show a job until it ends, or until Ctrl-C."""
    args = make_top_parser().parse_args(words)
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

    nodes, errors = ask_nodes(job, of_node="status", of_job="nodes")
    if not nodes:
        return Text("\n".join(errors)) if errors else None
    lines = render_status(nodes, label=job.label, width=width, color=shows_colors(1, os.environ))
    return Text.from_ansi("\n".join([*lines, *errors]))
