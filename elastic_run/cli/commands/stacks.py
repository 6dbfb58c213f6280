"""``elastic-run stacks [RUN]``: where each rank of a running job is, on all nodes.

With ``--native``, py-spy reads the frames of C and C++ too, of the workers on this machine.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.commands import CommandParser
from elastic_run.cli.commands.jobs import ask_nodes
from elastic_run.control.client import RUN_HELP, ask_all, find_job
from elastic_run.core.failure.stacks import Dump
from elastic_run.notices import UsageError, print_json, print_text, say
from elastic_run.report.stack_lines import details, rank_lines, summary
from elastic_run.report.text import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.control.client import RunningJob

#: The document's version: it grows where a field changes its meaning.
_VERSION = 1


def make_stacks_parser() -> CommandParser:
    """Make the parser of its arguments."""
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


def run_stacks(words: Sequence[str]) -> int:
    """Print the stacks; 1 if no worker runs, or no agent of the job answers."""
    args = make_stacks_parser().parse_args(words)
    job = find_job(os.environ, args.run)
    if args.native:
        return _show_native_stacks(job, args.rank, is_json=args.json)
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


def _show_native_stacks(job: RunningJob, rank: int | None, *, is_json: bool) -> int:
    """Print the stacks as py-spy reads them; 1 if there are none."""
    from elastic_run.diagnosis.native_stacks import find_py_spy, read_native_stacks

    program = find_py_spy()
    if not program:
        message = "--native: py-spy is not installed: pip install 'elastic-run[stacks]'"
        raise UsageError(message)
    pids = _find_pids(job)
    if not pids:
        say(f"no worker of job {job.label} runs now on this machine")
        return contract.EXIT_FAILURE
    if rank is not None:
        if rank not in pids:
            here = f"and --native reads only workers of this machine: {ranks(pids)}"
            message = f"--rank: {rank} does not run on this machine, {here}"
            raise UsageError(message)
        pids = {rank: pids[rank]}
    dumps = read_native_stacks(program, pids, has_children=rank is not None)
    problems = {dump.problem for dump in dumps.values()}
    if is_json:
        workers = [{"rank": rank, "text": dump.text, "problem": dump.problem} for rank, dump in dumps.items()]
        print_json({"version": _VERSION, "run": job.label, "workers": workers})
    elif len(problems) == 1 and "" not in problems:
        say(f"{ranks(dumps)}: {problems.pop()}")
        return contract.EXIT_FAILURE
    else:
        print_text("\n".join(rank_lines(dumps)) + "\n")
    return contract.EXIT_SUCCESS if "" in problems else contract.EXIT_FAILURE


def _find_pids(job: RunningJob) -> dict[int, int]:
    """Return the pids of the workers that run on this machine, by rank."""
    found: dict[int, int] = {}
    for answer in ask_all([agent.path for agent in job.agents], "status"):
        if answer.document is None:
            say(answer.error)
            continue
        running = [each for each in answer.document["workers"] if each["pid"] and each["exit_code"] is None]
        found |= {int(each["rank"]): int(each["pid"]) for each in running}
    return dict(sorted(found.items()))
