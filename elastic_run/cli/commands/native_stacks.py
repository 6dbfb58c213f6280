"""``elastic-run stacks --native``: the stacks of this machine's workers with their frames of C and C++, by py-spy."""

from __future__ import annotations

import json

from elastic_run import contract
from elastic_run.cli.stdout import print_text
from elastic_run.control.client import ask_all
from elastic_run.control.wire import Call
from elastic_run.diagnosis.native_stacks import find_py_spy, read_native_stacks
from elastic_run.errors import UsageError
from elastic_run.notices import say
from elastic_run.report.stack_lines import rank_lines
from elastic_run.report.wording import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.control.jobs import RunningJob
    from elastic_run.core.diagnosis.stacks import Dump

__all__ = ["show_native_stacks"]

_VERSION = 1


def show_native_stacks(job: RunningJob, rank: int | None, *, is_json: bool) -> int:
    """Print the stacks.

    Args:
        job: The job.
        rank: The only rank to show, or None.
        is_json: Whether one JSON document is printed.

    Returns:
        0, or 1 if there are no stacks.

    Raises:
        UsageError: py-spy is not installed, or the rank does not run on this machine.
    """
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
    if len(problems) == 1 and "" not in problems and not is_json:
        say(f"{ranks(dumps)}: {problems.pop()}")
        return contract.EXIT_FAILURE
    print_text(_document(job.label, dumps) if is_json else "\n".join(rank_lines(dumps)) + "\n")
    return contract.EXIT_SUCCESS if "" in problems else contract.EXIT_FAILURE


def _find_pids(job: RunningJob) -> dict[int, int]:
    """Return the pids of the workers that run on this machine, by rank."""
    found: dict[int, int] = {}
    for answer in ask_all([agent.path for agent in job.agents], Call("status", {})):
        if answer.document is None:
            say(answer.error)
            continue
        running = [each for each in answer.document["workers"] if each["pid"] and each["exit_code"] is None]
        found |= {int(each["rank"]): int(each["pid"]) for each in running}
    return dict(sorted(found.items()))


def _document(label: str, dumps: Mapping[int, Dump]) -> str:
    workers = [{"rank": rank, "text": dump.text, "problem": dump.problem} for rank, dump in dumps.items()]
    return json.dumps({"version": _VERSION, "run": label, "workers": workers}, indent=2) + "\n"
