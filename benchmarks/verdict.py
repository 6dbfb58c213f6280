"""What the closing lines of a launcher name, compared with the fault that was planted; and the figures of that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.faults import Case

#: Lines of a report within which the cause should stand, the title included.
FIRST_LINES = 5
_BENCHMARK = "diagnosis"
#: Percent that the faults given to both launchers have to reach.
_LEAST = 97.0
#: Seconds by which a hang's verdict may be later than its timeout.
_LATEST = 2.0
_US, _THEM = "elastic-run", "torchrun"
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
    """Compare what the nodes wrote with what was planted."""
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


# --- figures ----------------------------------------------------------------------------------------------------------
def make_figures(ours: Sequence[Verdict], theirs: Sequence[Verdict]) -> list[Figure]:
    """Return the rows of the table."""
    shares = [
        _share(ours, lambda verdict: verdict.has_rank, f"{len(ours)} planted faults: right rank or node named", 98),
        _share(ours, lambda verdict: verdict.has_cause, f"{len(ours)} planted faults: right cause named", 97),
        _share(
            ours,
            lambda verdict: verdict.is_early,
            f"{len(ours)} planted faults: cause within {FIRST_LINES} lines on every node",
            98,
        ),
    ]
    lines = [float(verdict.line) for verdict in ours if verdict.line]
    seconds = [verdict.seconds for verdict in ours if verdict.seconds is not None]
    late = [verdict.late for verdict in ours if verdict.late is not None]
    values = [
        _value(lines, "lines of the report until the cause", "lines"),
        _value(seconds, "fault to the launcher's end", "s"),
        _value(late, f"{len(late)} hangs: longest time from --hang-timeout to the verdict", "s", most=_LATEST),
    ]
    return [*shares, *[figure for figure in values if figure], *_beside(ours, theirs)]


def name_misses(missed: Sequence[Verdict]) -> str:
    """Return the faults that were missed, by name; the ranks and sizes of one kind in one clause."""
    kinds: dict[str, list[str]] = {}
    for verdict in missed:
        name, _, place = verdict.case.name.partition(" (")
        kinds.setdefault(name, []).append(place.rstrip(")"))
    return "missed: " + ", ".join(f"{name} ({'; '.join(places)})" for name, places in kinds.items()) if kinds else ""


def _share(verdicts: Sequence[Verdict], holds: Callable[[Verdict], bool], name: str, least: float) -> Figure:
    values = [100.0 * holds(verdict) for verdict in verdicts]
    return Figure(
        benchmark=_BENCHMARK,
        name=name,
        unit="%",
        bar=Bar(least, is_least=True),
        elastic_run=mean(values),
        values={_US: [values]},
        note=name_misses([verdict for verdict in verdicts if not holds(verdict)]),
    )


def _value(values: list[float], name: str, unit: str, *, most: float | None = None) -> Figure | None:
    """Return a figure of the median, or of the largest value, which has to hold a bar."""
    if not values:
        return None
    if most is not None:
        note = f"median {median(values):.3g} {unit}"
        return Figure(_BENCHMARK, name, unit, Bar(most), max(values), {_US: [values]}, note=note)
    note = f"largest {max(values):.3g} {unit}"
    return Figure(_BENCHMARK, name, unit, None, median(values), {_US: [values]}, note=note)


def _beside(ours: Sequence[Verdict], theirs: Sequence[Verdict]) -> list[Figure]:
    """Return what both launchers name of the faults that both were given."""
    if not theirs:
        return []
    given = {verdict.case for verdict in theirs}
    same = [verdict for verdict in ours if verdict.case in given]
    rows: dict[str, Callable[[Verdict], bool]] = {
        f"{len(theirs)} faults under both launchers: right rank": lambda verdict: verdict.has_rank,
        f"{len(theirs)} faults under both launchers: right cause": lambda verdict: verdict.has_cause,
    }
    figures = []
    for name, holds in rows.items():
        values = {_US: [[100.0 * holds(v) for v in same]], _THEM: [[100.0 * holds(v) for v in theirs]]}
        missed = name_misses([verdict for verdict in theirs if not holds(verdict)])
        figures.append(
            Figure(
                benchmark=_BENCHMARK,
                name=name,
                unit="%",
                bar=Bar(_LEAST, is_least=True),
                elastic_run=mean(values[_US][0]),
                torchrun=mean(values[_THEM][0]),
                values=values,
                note=f"torchrun's closing lines {missed}" if missed else "",
            )
        )
    return figures
