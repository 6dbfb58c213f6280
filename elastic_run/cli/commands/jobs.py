"""``elastic-run status``, ``ps``, ``top``, ``stop`` and ``drain``: questions and requests to agents of running jobs.

``status`` prints the table of one job; ``top`` draws the same table again and again; ``ps`` lists the jobs. ``stop``
stops the launchers of a job on this machine, as SIGTERM would, and awaits their end. After ``drain`` the other nodes go
on without the node, if they are enough. `ask_nodes` also serves ``stacks``.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import time

from elastic_run import contract
from elastic_run.cli.commands import CommandParser, argument
from elastic_run.control.client import (
    NO_JOB,
    RUN_HELP,
    WAIT_LIMIT,
    ask_all,
    choose_job,
    find_job,
    find_jobs,
    name_job,
)
from elastic_run.control.socket_directory import VERSION, is_stale
from elastic_run.notices import UsageError, print_json, print_text, replace_unknown, say
from elastic_run.report.status_table import add_behind, find_left_out, render_status
from elastic_run.report.text import columns, count, printable, shows_colors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rich.text import Text

    from elastic_run.control.client import RunningAgent, RunningJob

_HEADINGS = ("RUN", "PID", "STATE", "STARTED", "PROGRAM")
#: Seconds between two tables of `top`, unless the user says otherwise, and at least: the agent measures for 0.1 s.
_INTERVAL = 1.0
_SHORTEST = 0.2
#: Seconds for an answer for all nodes: longer than an agent waits for the other nodes.
_ALL_NODES_LIMIT = {"nodes": 6.0, "job_stacks": 12.0, "drain": 6.0}
#: A wait of poll(2) of `stop`, in seconds; the end may come in a later one.
_LONGEST_WAIT = 3600.0
#: Seconds between two checks for an agent's socket, if its process can't be waited for.
_LOOK = 0.1
#: Nodes that an error of `drain` names.
_NAMED = 8

_RUN = argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
_NODE = "host name of the node, or its node rank, as `elastic-run status --json` shows them"
_UPDATES = f"seconds between two updates (default: {_INTERVAL:g})"
_TIMEOUT = "give up, with exit code 1, if the job still runs after this time (default: no limit)"
ARGUMENTS = {
    "status": [_RUN, argument("--json", action="store_true", help="print one JSON document instead of a table")],
    "ps": [],
    "top": [_RUN, argument("--interval", type=float, default=_INTERVAL, metavar="SECONDS", help=_UPDATES)],
    "stop": [_RUN, argument("--timeout", type=float, metavar="SECONDS", help=_TIMEOUT)],
    "drain": [argument("node", metavar="NODE", help=_NODE), _RUN],
}


def ask_nodes(job: RunningJob, *, of_node: str, of_job: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the agents of a job on this machine, and through one of them those on other machines.

    An agent answers the request `of_node` for its own node, and `of_job` for all nodes. Returns the documents of the
    nodes by node rank, and why a node is missing.
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


def run_status(words: Sequence[str]) -> int:
    """Print the state of a job, or the list of several jobs if none is named; 1 if no agent of the job answers."""
    args = CommandParser("status").parse_args(words)
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
    add_behind(nodes)
    if args.json:
        print_json({"version": VERSION, "run": job.label, "left_out": find_left_out(nodes), "nodes": nodes})
    else:
        width = shutil.get_terminal_size().columns
        lines = render_status(nodes, label=job.label, width=width, color=shows_colors(1, os.environ))
        print_text("\n".join(lines) + "\n")
    return contract.EXIT_SUCCESS


# --- ps --------------------------------------------------------------------------------------------------------------


def run_ps(words: Sequence[str]) -> int:
    """Print a row for each job of this user on this machine; 0, also if there is no job."""
    CommandParser("ps").parse_args(words)
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


def run_top(words: Sequence[str]) -> int:
    """Show a job until it ends, or until Ctrl-C."""
    args = CommandParser("top").parse_args(words)
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
    add_behind(nodes)
    lines = render_status(nodes, label=job.label, width=width, color=shows_colors(1, os.environ))
    return Text.from_ansi("\n".join([*lines, *errors]))


# --- stop ------------------------------------------------------------------------------------------------------------


def run_stop(words: Sequence[str]) -> int:
    """Stop a job; 0 when its launchers on this machine have ended, 1 if one refuses or has not ended in time."""
    args = CommandParser("stop").parse_args(words)
    if args.timeout is not None and not args.timeout >= 0:
        message = f"--timeout: {args.timeout} must be 0 or more seconds"
        raise UsageError(message)
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    return stop_job(find_job(os.environ, args.run), deadline)


def stop_job(job: RunningJob, deadline: float | None, *, wait_limit: float = WAIT_LIMIT) -> int:
    """Ask the launchers of a job to stop, and wait for the end of the launchers that accept."""
    # Before anything is asked: a pid may belong to another process once its own has ended.
    waiting = {agent.path: _open_pidfd(agent) for agent in job.agents}
    answers = ask_all([*waiting], "stop", {"pid": os.getpid()}, wait_limit=wait_limit)
    refused = [answer for answer in answers if answer.error]
    for answer in refused:
        say(answer.error)
        del waiting[answer.path]
    has_ended = [_wait_end(path, fd, deadline) for path, fd in waiting.items()]
    if not all(has_ended):
        say(f"job {job.label} still runs: its workers get their grace period (--shutdown-timeout)")
    elif not refused:
        say(f"job {job.label} has ended")
    return contract.EXIT_SUCCESS if all(has_ended) and not refused else contract.EXIT_FAILURE


def _wait_end(path: str, pidfd: int | None, deadline: float | None) -> bool:
    """Wait for an agent's end; return whether it came in time."""
    poll = select.poll()
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    while deadline is None or time.monotonic() < deadline:
        left = _LONGEST_WAIT if deadline is None else max(0.0, deadline - time.monotonic())
        seconds = min(left, _LOOK if pidfd is None else _LONGEST_WAIT)
        is_gone = bool(poll.poll(seconds * 1000))
        if is_gone or (pidfd is None and (not os.path.exists(path) or is_stale(path))):
            return True
    return False


def _open_pidfd(agent: RunningAgent) -> int | None:
    """Return a pidfd of an agent's process; None if the process goes on after the job."""
    if not agent.is_whole_process:
        return None
    try:
        return os.pidfd_open(agent.pid)
    except OSError:
        return None  # it has ended, or is in another pid namespace


# --- drain -----------------------------------------------------------------------------------------------------------


def run_drain(words: Sequence[str]) -> int:
    """Let a node leave; 0 when the node has taken the request, 1 if it may not have."""
    args = CommandParser("drain").parse_args(words)
    job = find_job(os.environ, args.run)
    if job.agents[0].max_nodes == 1:
        message = f"job {job.label} has one node: `elastic-run stop {job.label}` ends it"
        raise UsageError(message)
    answers = ask_all([job.agents[0].path], "drain", {"node": args.node}, wait_limit=_ALL_NODES_LIMIT["drain"])
    answer = answers[0].document if answers else None
    if answer is None:
        raise UsageError(answers[0].error if answers else f"job {job.label} has ended")
    nodes: list[dict[str, Any]] = answer["nodes"]
    leaving = [node for node in nodes if node["is_leaving"]]
    for node in leaving:
        say(f"{_name(node)} leaves job {job.label}: its workers get their grace period, the other nodes go on")
    if leaving:
        return contract.EXIT_SUCCESS
    if answer["missing"]:
        say(f"{count(answer['missing'], 'node')} of {answer['members']} did not answer, and may be {args.node!r}")
        return contract.EXIT_FAILURE
    shown = ", ".join(_name(node) for node in nodes[:_NAMED])
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    # A node without workers, or whose round has just begun, has other ranks in mind than the others.
    missed = f"of rank {args.node} in the round of this node" if args.node.isdecimal() else repr(args.node)
    message = f"job {job.label} has no node {missed}; it has {shown}{more}"
    raise UsageError(message)


def _name(node: dict[str, Any]) -> str:
    rank = node["node_rank"]
    return printable(node["host"]) + ("" if rank is None else f" (node rank {rank})")
