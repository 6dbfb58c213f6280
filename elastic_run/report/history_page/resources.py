"""The resources of each rank, as curves: processor time as a share of one processor, and resident memory.

Pure. The event log has a reading from time to time; between two readings the curves are straight lines, and between the
rounds there are none.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.history_page.timeline import Span
    from elastic_run.report.job_history import Job, Reading

#: Height of a drawing in its own units, curves in it, and points of a curve.
HEIGHT = 120.0
_CURVES = 6
_POINTS = 400

#: Values of one worker in one round: wall clock and value.
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """What one rank used.

    Args:
        rank: Its global rank.
        text: Its average or its highest value, in words.
        path: The drawing's path.
    """

    rank: int
    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing.

    Args:
        title: The title of the curves.
        top: The highest value, in words.
        curves: The ranks that stand out most.
        others: Number of ranks that are not drawn.
    """

    title: str
    top: str
    curves: list[Curve]
    others: int


def draw_resources(job: Job, span: Span) -> list[Chart]:
    """Return the drawings of a job; none where fewer than two readings of a worker are known."""
    cpu: dict[int, list[Points]] = {}
    memory: dict[int, list[Points]] = {}
    for each in job.rounds:
        for member in each.members.values():
            for worker in member.workers.values():
                if len(worker.readings) > 1:
                    cpu.setdefault(worker.rank, []).append(_find_shares(worker.readings))
                    memory.setdefault(worker.rank, []).append([(one.at, one.memory) for one in worker.readings])
    if not cpu:
        return []
    averages = {rank: mean(value for points in rounds for _, value in points) for rank, rounds in cpu.items()}
    middle = median(averages.values())
    unlike = sorted(averages, key=lambda rank: (-abs(averages[rank] - middle), rank))
    peaks = {rank: _find_highest(rounds) for rank, rounds in memory.items()}
    large = sorted(peaks, key=lambda rank: (-peaks[rank], rank))
    return [
        _draw_chart("Processor time", cpu, unlike, span, {rank: f"{averages[rank]:.0f} % on average" for rank in cpu}),
        _draw_chart("Memory", memory, large, span, {rank: _size(peaks[rank]) for rank in memory}),
    ]


def _find_shares(readings: list[Reading]) -> Points:
    """Return percent of one processor between each two readings, at the later one and at the first."""
    shares = [
        (after.at, max(0.0, 100 * (after.cpu - before.cpu) / max(after.at - before.at, 1e-3)))
        for before, after in pairwise(readings)
    ]
    return [(readings[0].at, shares[0][1]), *shares]


def _find_highest(rounds: list[Points]) -> float:
    return max(value for points in rounds for _, value in points)


def _draw_chart(
    title: str, values: dict[int, list[Points]], ranks: list[int], span: Span, texts: dict[int, str]
) -> Chart:
    chosen = sorted(ranks[:_CURVES])  # in a small job each rank has the same colour in both drawings
    highest = max(1.0, *(_find_highest(values[rank]) for rank in chosen))
    curves = [Curve(rank, texts[rank], _draw(values[rank], span, highest)) for rank in chosen]
    top = _size(highest) if title == "Memory" else f"{highest:.0f} %"
    return Chart(title, top, curves, len(ranks) - len(chosen))


def _draw(rounds: list[Points], span: Span, highest: float) -> str:
    step = 1 + sum(map(len, rounds)) // _POINTS
    return "".join(
        f"{'L' if index else 'M'}{span.place(at):.1f} {HEIGHT * (1 - value / highest):.1f}"
        for points in rounds
        for index, (at, value) in enumerate([*points[:-1:step], points[-1]])
    )


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"  # noqa: PLR2004 - MiB of a GiB
