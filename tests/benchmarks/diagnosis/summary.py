"""The figures of all verdicts, with the misses by name."""

from __future__ import annotations

from statistics import mean, median
from typing import TYPE_CHECKING

from tests.benchmarks.diagnosis.verdict import FIRST_LINES
from tests.benchmarks.figures import Bar, Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.benchmarks.diagnosis.verdict import Verdict

_BENCHMARK = "diagnosis"
#: Percent that the faults given to both launchers have to reach.
_LEAST = 97.0
#: Seconds by which a hang's verdict may be later than its timeout.
_LATEST = 2.0
_US, _THEM = "elastic-run", "torchrun"


def make_figures(ours: Sequence[Verdict], theirs: Sequence[Verdict]) -> list[Figure]:
    """Return the rows of the table.

    Args:
        ours: The verdicts of elastic-run.
        theirs: Those of torchrun, on some of the same faults.
    """
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
