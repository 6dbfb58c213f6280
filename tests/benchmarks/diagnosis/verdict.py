"""What the closing lines of a launcher name, compared with the fault that was planted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.benchmarks.diagnosis.cases import Case

#: Lines of a report within which the cause should stand, the title included.
FIRST_LINES = 5
_TITLE = re.compile(r"^-- elastic-run: ")
#: torchrun lists the other failures before the one that it takes for the cause.
_TORCHRUN = re.compile(r"^Root Cause \(first observed failure\)")
_RANK = re.compile(r"\branks?\s*:?\s*(\d+)(?![\d-]|, \d)")
_RANKS = re.compile(r"\branks?\s*:?\s*\d")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Verdict:
    """What a job's reports say.

    Args:
        case: What was planted.
        has_rank: Whether the first rank that each report names is the right one.
        has_cause: Whether each report names the cause.
        line: The line of the report, counted from its title, with which the cause is complete; of several nodes the
            last one's; 0 where a report does not name it.
        seconds: From the fault to the launcher's end, or None where the job had to be ended.
        text: All reports.
        late: Seconds from the fault to the line that the job hangs, without --hang-timeout; None where there is none.
    """

    case: Case
    has_rank: bool
    has_cause: bool
    line: int
    seconds: float | None
    text: str
    late: float | None = None

    @property
    def is_early(self) -> bool:
        """Whether the cause stands within the first lines, on every node."""
        return self.has_cause and 0 < self.line <= FIRST_LINES


def judge(case: Case, outputs: Sequence[str], seconds: float | None, *, host: str = "") -> Verdict:
    """Compare what the nodes wrote with what was planted.

    Args:
        case: What was planted.
        outputs: What each node's launcher wrote to stderr.
        seconds: From the fault to the launcher's end, or None.
        host: The name of the host that has the fault; instead of a rank the reports may name it.
    """
    reports = [closing_lines(output) for output in outputs]
    lines = [_line_of(case.fault.cause, report) for report in reports]
    return Verdict(
        case=case,
        has_rank=bool(reports) and all(_names_rank(report, case.rank, host) for report in reports),
        has_cause=bool(lines) and all(lines),
        line=max(lines, default=0) if all(lines) else 0,
        seconds=seconds,
        text="\n".join("\n".join(report) for report in reports),
    )


def closing_lines(output: str) -> list[str]:
    """Return the lines of a launcher's closing report, the title first; elastic-run's or torchrun's."""
    lines = _COLOUR.sub("", output).splitlines()
    starts = [index for index, line in enumerate(lines) if _TITLE.match(line)]
    if not starts:
        starts = [index for index, line in enumerate(lines) if _TORCHRUN.match(line.strip())]
    return lines[starts[-1] :] if starts else []


def _line_of(cause: str, report: Sequence[str]) -> int:
    """Return the number of lines that have to be read until the cause is complete; 0 where it isn't there."""
    wanted = re.compile(cause)
    for count in range(1, len(report) + 1):
        if wanted.search(" ".join(" ".join(report[:count]).split())):
            return count
    return 0


def _names_rank(report: Sequence[str], rank: int, host: str) -> bool:
    """Whether the first rank that a report names is the one, or the first host where a host is meant."""
    text = " ".join(" ".join(report).split())
    named = _RANKS.search(text)
    if host:
        first = re.search(r"\bh\d\b", text)
        return first is not None and first[0] == host
    found = None if named is None else _RANK.match(text, named.start())
    return found is not None and int(found[1]) == rank
