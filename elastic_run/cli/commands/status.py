"""``elastic-run status [RUN]``: the state of a running job and of each of its workers."""

from __future__ import annotations

import json
import os
import shutil
import sys

from elastic_run import contract
from elastic_run.cli.commands import COMMANDS
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.parser import print_text
from elastic_run.control.client import ask_all
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.control.wire import VERSION, Call
from elastic_run.notices import say
from elastic_run.report.status_table import render_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.control.jobs import RunningJob


def main(words: Sequence[str]) -> int:
    """Print the state of a job.

    Args:
        words: The arguments.

    Returns:
        0, or 1 if no agent of the job answers.

    Raises:
        UsageError: There is no such job, or there are several.
        SystemExit: The help was printed (0).
    """
    parser = CommandParser("status")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    args = parser.parse_args(words)
    job = find_job(os.environ, args.run)
    nodes, errors = gather_nodes(job)
    for error in errors:
        say(error)
    if not nodes:
        return contract.EXIT_FAILURE
    if args.json:
        print_text(json.dumps({"version": VERSION, "run": job.label, "nodes": nodes}, indent=2) + "\n")
        return contract.EXIT_SUCCESS
    lines = render_status(
        nodes,
        label=job.label,
        width=shutil.get_terminal_size().columns,
        color=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
        has_stacks="stacks" in COMMANDS,
    )
    print_text("\n".join(lines) + "\n")
    return contract.EXIT_SUCCESS


def gather_nodes(job: RunningJob) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the agents of a job on this machine, and through one of them those on other machines.

    Returns:
        The documents of the nodes by node rank, and why a node is missing.
    """
    first, *others = job.agents
    nodes: list[dict[str, Any]] = []
    errors: list[str] = []
    asked = list(job.agents)
    if first.max_nodes > 1:
        answer = next(iter(ask_all([first.path], Call("nodes", {}))), None)
        if answer is not None and answer.document is not None:
            nodes = list(answer.document["nodes"])
            here = {node["pid"] for node in nodes if node["host"] == nodes[0]["host"]}
            asked = [agent for agent in others if agent.pid not in here]  # those that wait are asked less often
            missing = int(answer.document["expected"]) - len(nodes)
            errors = [f"{missing} of {answer.document['expected']} nodes have not answered"] if missing > 0 else []
    for answer in ask_all([agent.path for agent in asked], Call("status", {})):
        if answer.document is not None:
            nodes.append(answer.document)
        else:
            errors.append(answer.error)
    nodes.sort(key=lambda node: (node.get("node_rank") is None, node.get("node_rank") or 0))
    return nodes, errors
