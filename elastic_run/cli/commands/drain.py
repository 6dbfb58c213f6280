"""``elastic-run drain NODE [RUN]``: lets one node of a job leave; the others go on without it, if they are enough."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.control.client import ask
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.control.wire import Call, ControlError
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.text import printable
from elastic_run.report.wording import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NODE = "host name of the node, or its node rank, as `elastic-run status --json` shows them"
#: Seconds for the answers of all nodes.
_WAIT_LIMIT = 6.0
#: Nodes that an error names.
_NAMED = 8


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("drain")
    parser.add_argument("node", metavar="NODE", help=_NODE)
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    return parser


def main(words: Sequence[str]) -> int:
    """Let a node leave.

    Returns:
        0 when the node has taken the request, 1 if it may not have.

    Raises:
        UsageError: There is no such job, it has one node, or it has no such node.
        SystemExit: The help was printed (0).
    """
    args = make_parser().parse_args(words)
    job = find_job(os.environ, args.run)
    if job.agents[0].max_nodes == 1:
        message = f"job {job.label} has one node: `elastic-run stop {job.label}` ends it"
        raise UsageError(message)
    try:
        answer = ask(job.agents[0].path, Call("drain", {"node": args.node}), wait_limit=_WAIT_LIMIT)
    except ControlError as error:
        raise UsageError(str(error)) from None
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
