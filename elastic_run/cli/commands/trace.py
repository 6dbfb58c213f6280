"""``elastic-run trace PATH…``: which rank did not join which collective, from the dumps of torch's flight recorder.

The dumps may be of some ranks only, and may have any names. The text fits one screen: the cause, its consequences, the
files.
"""

from __future__ import annotations

import os

from elastic_run.cli.commands import CommandParser, argument
from elastic_run.diagnosis.dumps import DumpError, find_dumps
from elastic_run.diagnosis.trace_analysis import analyse
from elastic_run.diagnosis.trace_findings import cause_line, detail_lines
from elastic_run.notices import UsageError, print_json, print_text
from elastic_run.report.text import count, printable, ranks, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.diagnosis.dumps import FoundDumps
    from elastic_run.diagnosis.trace_findings import Analysis, Finding

#: Columns of a line and of its label; numbers of causes, of details of each, of consequences and of files to show.
_WIDTH = 100
_LABEL = 9
_MOST_CAUSES = 3
_MOST_DETAILS = 4
_MOST_CONSEQUENCES = 3
_MOST_PROBLEMS = 5
_SAME = "the ranks with a dump have called the same collectives"

ARGUMENTS = {
    "trace": [
        argument("path", nargs="+", metavar="PATH", help="a dump, or a directory that has dumps in it"),
        argument("--json", action="store_true", help="print one JSON document"),
    ]
}


def run_trace(words: Sequence[str]) -> int:
    """Print the analysis; 0, also where nothing is wrong."""
    arguments = CommandParser("trace").parse_args(words)
    try:
        found = find_dumps(arguments.path)
    except DumpError as error:
        raise UsageError(str(error)) from error
    if not found.dumps:
        raise UsageError(_nothing(arguments.path, found))
    analysis = analyse(found.dumps)
    if arguments.json:
        print_json(_document(analysis, found))
    else:
        print_text("\n".join(_lines(analysis, found)) + "\n")
    return 0


def _nothing(paths: list[str], found: FoundDumps) -> str:
    if found.problems:
        more = f" ({count(len(found.problems), 'file')} like this)" if len(found.problems) > 1 else ""
        return f"{found.problems[0]}{more}"
    return f"no dump of a flight recorder in {', '.join(map(repr, paths))} ({count(found.foreign, 'other file')})"


def _lines(analysis: Analysis, found: FoundDumps) -> list[str]:
    lines: list[str] = []
    for finding in analysis.findings[:_MOST_CAUSES]:
        lines += _section("cause" if not lines else "and", cause_line(finding), 4)
        for detail in detail_lines(finding)[:_MOST_DETAILS]:
            lines += _section("", detail, 2)
    if not lines:
        is_empty = not any(dump.collectives for dump in found.dumps)
        reason = "the dumps have no collectives (torch before 2.8 records none of gloo)" if is_empty else _SAME
        lines += _section("cause", f"none found: {reason}", 2)
    for finding in analysis.consequences[:_MOST_CONSEQUENCES]:
        lines += _section("follows", cause_line(finding), 2)
    absent = f"; no dump of {ranks(analysis.absent)}" if analysis.absent else ""
    lines += _section("dumps", f"{count(len(analysis.ranks), 'dump')} read, of {ranks(analysis.ranks)}{absent}", 2)
    for problem in found.problems[:_MOST_PROBLEMS]:
        lines += _section("", problem, 2)
    if len(found.problems) > _MOST_PROBLEMS:
        lines += _section("", f"... ({len(found.problems)} remarks in all)", 1)
    return lines


def _section(label: str, text: str, most: int) -> list[str]:
    lines = wrap(printable(text), _WIDTH - _LABEL, most)
    return [f"{(label if index == 0 else ''):<{_LABEL}}{line}" for index, line in enumerate(lines)]


def _document(analysis: Analysis, found: FoundDumps) -> dict[str, Any]:
    """Return the analysis as a document; its version grows where a field changes its meaning."""
    return {
        "version": 1,
        "findings": [_finding_document(finding) for finding in analysis.findings],
        "consequences": [_finding_document(finding) for finding in analysis.consequences],
        "ranks": list(analysis.ranks),
        "ranks_without_dump": list(analysis.absent),
        "files": {str(dump.rank): os.path.abspath(dump.source) for dump in found.dumps},
        "problems": list(found.problems),
    }


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "text": cause_line(finding),
        "details": detail_lines(finding),
        "group": finding.group,
        "group_description": finding.description,
        "group_ranks": list(finding.members),
        "operation": finding.operation,
        "sequence": finding.sequence,
        "ranks": list(finding.ranks),
        "waiting": list(finding.waiting),
        "where": finding.where,
        "behind": {str(rank): number for rank, number in finding.behind},
    }
