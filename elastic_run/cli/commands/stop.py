"""``elastic-run stop`` and ``drain``: end a job, or let one node of it leave.

``stop`` stops the launchers of a job on this machine, as SIGTERM would, and awaits their end. After ``drain`` the other
nodes go on without the node, if they are enough.
"""

from __future__ import annotations

import os
import select
import time

from elastic_run import contract
from elastic_run.cli.commands import CommandParser
from elastic_run.control.client import RUN_HELP, WAIT_LIMIT, ask_all, find_job
from elastic_run.control.socket_directory import is_stale
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.text import count, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.control.client import RunningAgent, RunningJob

#: A wait of poll(2), in seconds; the end may come in a later one.
_LONGEST_WAIT = 3600.0
#: Seconds between two checks for an agent's socket, if its process can't be waited for.
_LOOK = 0.1
#: Seconds for the answers of all nodes to `drain`, and nodes that an error names.
_ALL_NODES_LIMIT = 6.0
_NAMED = 8


def make_stop_parser() -> CommandParser:
    """Return the parser of `elastic-run stop`."""
    parser = CommandParser("stop")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    text = "give up, with exit code 1, if the job still runs after this time (default: no limit)"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=text)
    return parser


def run_stop(words: Sequence[str]) -> int:
    """Stop a job; 0 when its launchers on this machine have ended, 1 if one refuses or has not ended in time."""
    args = make_stop_parser().parse_args(words)
    if args.timeout is not None and not args.timeout >= 0:
        message = f"--timeout: {args.timeout} must be 0 or more seconds"
        raise UsageError(message)
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    return stop_job(find_job(os.environ, args.run), deadline)


def stop_job(job: RunningJob, deadline: float | None, *, wait_limit: float = WAIT_LIMIT) -> int:
    """Ask the launchers of a job to stop, and wait for the end of the launchers that accept.

    Args:
        job: The job.
        deadline: Monotonic seconds until which its end is awaited, or None.
        wait_limit: Seconds for the answers.
    """
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


def make_drain_parser() -> CommandParser:
    """Return the parser of `elastic-run drain`."""
    parser = CommandParser("drain")
    text = "host name of the node, or its node rank, as `elastic-run status --json` shows them"
    parser.add_argument("node", metavar="NODE", help=text)
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    return parser


def run_drain(words: Sequence[str]) -> int:
    """Let a node leave; 0 when the node has taken the request, 1 if it may not have."""
    args = make_drain_parser().parse_args(words)
    job = find_job(os.environ, args.run)
    if job.agents[0].max_nodes == 1:
        message = f"job {job.label} has one node: `elastic-run stop {job.label}` ends it"
        raise UsageError(message)
    answers = ask_all([job.agents[0].path], "drain", {"node": args.node}, wait_limit=_ALL_NODES_LIMIT)
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
