"""``elastic-run stacks [RUN]``: where each rank of a running job is, on all nodes."""

from __future__ import annotations

import json
import os

from elastic_run import contract
from elastic_run.cli.commands.nodes import JOB_STACKS, ask_nodes
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.stdout import print_text
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.core.diagnosis.stacks import Dump
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.stack_lines import details, rank_lines, summary
from elastic_run.report.wording import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.control.jobs import RunningJob

#: The document's version: it grows where a field changes its meaning.
_VERSION = 1


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("stacks")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--rank", type=int, metavar="RANK", help="show all threads of this rank")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--native",
        action="store_true",
        help="show the frames of C and C++ too, of workers on this machine, by py-spy; with --rank also the Python "
        "processes that the worker has started, such as data loaders",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Print the stacks.

    Returns:
        0, or 1 if no worker runs, or no agent of the job answers.

    Raises:
        UsageError: There is no such job, there are several, or the job has no such rank.
        SystemExit: The help was printed (0).
    """
    args = make_parser().parse_args(words)
    job = find_job(os.environ, args.run)
    if args.native:
        from elastic_run.cli.commands.native_stacks import show_native_stacks

        return show_native_stacks(job, args.rank, is_json=args.json)
    nodes, errors = ask_nodes(job, JOB_STACKS)
    for error in errors:
        say(error)
    dumps = _read_dumps(nodes)
    if not dumps:
        say(_explain_nothing(job, nodes))
        return contract.EXIT_FAILURE
    if args.rank is not None:
        dumps = {args.rank: _choose(dumps, args.rank)}
    print_text(_document(job.label, dumps) if args.json else _text(dumps, has_all_threads=args.rank is not None))
    return contract.EXIT_SUCCESS


def _read_dumps(nodes: Sequence[dict[str, Any]]) -> dict[int, Dump]:
    return {
        int(worker["rank"]): Dump(
            str(worker["text"]), str(worker["problem"]), str(worker["details"]), worker.get("silence")
        )
        for node in nodes
        for worker in node["workers"]
    }


def _explain_nothing(job: RunningJob, nodes: Sequence[dict[str, Any]]) -> str:
    states = sorted({str(node["state"]) for node in nodes if "state" in node})
    return f"no worker of job {job.label} runs now" + (f": it is {' and '.join(states)}" if states else "")


def _choose(dumps: dict[int, Dump], rank: int) -> Dump:
    if rank not in dumps:
        message = f"--rank: {rank} does not run now, or its node has not answered: there are {ranks(dumps)}"
        raise UsageError(message)
    return dumps[rank]


def _text(dumps: dict[int, Dump], *, has_all_threads: bool) -> str:
    lines = [summary(dumps), ""]
    lines += rank_lines(dumps) if has_all_threads else details(dumps)
    return "\n".join(lines).rstrip() + "\n"


def _document(label: str, dumps: dict[int, Dump]) -> str:
    workers = [
        {
            "rank": rank,
            "text": dump.text,
            "problem": dump.problem,
            "details": dump.details,
            "silence": dump.silence,
        }
        for rank, dump in sorted(dumps.items())
    ]
    return (
        json.dumps({"version": _VERSION, "run": label, "summary": summary(dumps), "workers": workers}, indent=2) + "\n"
    )
