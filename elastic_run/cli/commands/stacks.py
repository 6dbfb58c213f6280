"""``elastic-run stacks [RUN]``: where each rank of a running job is, on all nodes."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.commands import CommandParser, argument
from elastic_run.cli.commands.jobs import ask_nodes
from elastic_run.control.client import RUN_HELP, find_job
from elastic_run.core.failure.stacks import Dump
from elastic_run.notices import UsageError, print_json, print_text, say
from elastic_run.report.stack_lines import details, rank_lines, summary
from elastic_run.report.text import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

#: The document's version: it grows where a field changes its meaning.
_VERSION = 1

ARGUMENTS = {
    "stacks": [
        argument("run", nargs="?", metavar="RUN", help=RUN_HELP),
        argument("--rank", type=int, metavar="RANK", help="show all threads of this rank"),
        argument("--json", action="store_true", help="print one JSON document"),
    ]
}


def run_stacks(words: Sequence[str]) -> int:
    """Print the stacks; 1 if no worker runs, or no agent of the job answers."""
    args = CommandParser("stacks").parse_args(words)
    job = find_job(os.environ, args.run)
    nodes, errors = ask_nodes(job, of_node="stacks", of_job="job_stacks")
    for error in errors:
        say(error)
    dumps = {int(worker["rank"]): _read_dump(worker) for node in nodes for worker in node["workers"]}
    if not dumps:
        states = sorted({str(node["state"]) for node in nodes if "state" in node})
        say(f"no worker of job {job.label} runs now" + (f": it is {' and '.join(states)}" if states else ""))
        return contract.EXIT_FAILURE
    if args.rank is not None:
        if args.rank not in dumps:
            message = f"--rank: {args.rank} does not run now, or its node has not answered: there are {ranks(dumps)}"
            raise UsageError(message)
        dumps = {args.rank: dumps[args.rank]}
    if args.json:
        fields = ("text", "problem", "details", "silence")
        workers = [
            {"rank": rank, **{name: getattr(dump, name) for name in fields}} for rank, dump in sorted(dumps.items())
        ]
        print_json({"version": _VERSION, "run": job.label, "summary": summary(dumps), "workers": workers})
    else:
        lines = [summary(dumps), "", *(details(dumps) if args.rank is None else rank_lines(dumps))]
        print_text("\n".join(lines).rstrip() + "\n")
    return contract.EXIT_SUCCESS


def _read_dump(worker: dict[str, Any]) -> Dump:
    return Dump(str(worker["text"]), str(worker["problem"]), str(worker["details"]), worker.get("silence"))
