"""``elastic-run stacks [RUN]``: where each rank of a running job is, on this machine."""

from __future__ import annotations

import json
import os

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.parser import print_text
from elastic_run.control.client import ask_all
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.control.wire import Call
from elastic_run.core.diagnosis.stack_groups import Dump
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.stack_lines import details, rank_lines, summary
from elastic_run.report.wording import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.control.client import Answer

#: The document's version: it grows where a field changes its meaning.
_VERSION = 1


def main(words: Sequence[str]) -> int:
    """Print the stacks.

    Args:
        words: The arguments.

    Returns:
        0, or 1 if no worker runs, or no agent of the job answers.

    Raises:
        UsageError: There is no such job, there are several, or the job has no such rank on this machine.
        SystemExit: The help was printed (0).
    """
    parser = CommandParser("stacks")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--rank", type=int, metavar="RANK", help="show all threads of this rank")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(words)
    job = find_job(os.environ, args.run)
    answers = ask_all([agent.path for agent in job.agents], Call("stacks", {}))
    for answer in answers:
        if answer.error:
            say(answer.error)
    dumps = _read_dumps(answers)
    if not dumps:
        say(f"no worker of job {job.label} runs on this machine")
        return contract.EXIT_FAILURE
    if args.rank is not None:
        dumps = {args.rank: _choose(dumps, args.rank)}
    print_text(_document(job.label, dumps) if args.json else _text(dumps, has_all_threads=args.rank is not None))
    return contract.EXIT_SUCCESS


def _read_dumps(answers: Sequence[Answer]) -> dict[int, Dump]:
    return {
        int(worker["rank"]): Dump(str(worker["text"]), str(worker["problem"]), str(worker["details"]))
        for answer in answers
        if answer.document is not None
        for worker in answer.document["workers"]
    }


def _choose(dumps: dict[int, Dump], rank: int) -> Dump:
    if rank not in dumps:
        message = f"--rank: {rank} does not run here: this machine has {ranks(dumps)}"
        raise UsageError(message)
    return dumps[rank]


def _text(dumps: dict[int, Dump], *, has_all_threads: bool) -> str:
    lines = [summary(dumps), ""]
    lines += rank_lines(dumps) if has_all_threads else details(dumps)
    return "\n".join(lines).rstrip() + "\n"


def _document(label: str, dumps: dict[int, Dump]) -> str:
    workers = [
        {"rank": rank, "text": dump.text, "problem": dump.problem, "details": dump.details}
        for rank, dump in sorted(dumps.items())
    ]
    return (
        json.dumps({"version": _VERSION, "run": label, "summary": summary(dumps), "workers": workers}, indent=2) + "\n"
    )
