"""How long each rank was silent, as curves: they rise while a rank writes nothing, and fall when it writes.

Pure. Only silences of ten seconds and more are in the event log, and those at the end of a worker.
"""

from __future__ import annotations

from elastic_run.records import dataclass
from elastic_run.report.history_page.timeline import SCALE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.history_page.timeline import Span
    from elastic_run.report.job_history import Job

#: Height of the drawing in its own units, curves in it, and seconds below which a silence is none.
HEIGHT = 120.0
_CURVES = 6
_LEAST = 10.0
_POINTS = 400


@dataclass(frozen=True, slots=True)
class Curve:
    """The silences of one rank.

    Args:
        rank: Its global rank.
        longest: Seconds.
        path: The drawing's path.
    """

    rank: int
    longest: float
    path: str


@dataclass(frozen=True, slots=True)
class Silences:
    """The silences of a job.

    Args:
        curves: Of the ranks with the longest silences, the longest first.
        ranks: Ranks with silences.
        is_seen: Whether the stdout of any rank was seen.
        longest: Seconds.
    """

    curves: list[Curve]
    ranks: int
    is_seen: bool
    longest: float


def draw_silences(job: Job, span: Span) -> Silences:
    """Return the curves of a job."""
    of_rank: dict[int, list[tuple[float, float]]] = {}
    is_seen = False
    for each in job.rounds:
        for member in each.members.values():
            for worker in member.workers.values():
                is_seen = is_seen or worker.is_output_seen
                if worker.is_output_seen:
                    long = [silence for silence in worker.silences if silence[1] >= _LEAST]
                    of_rank.setdefault(worker.rank, []).extend(long)
    longest = {rank: max(seconds for _, seconds in found) for rank, found in of_rank.items() if found}
    highest = max(longest.values(), default=0.0)
    chosen = sorted(longest, key=lambda rank: (-longest[rank], rank))[:_CURVES]
    curves = [Curve(rank, longest[rank], _draw(of_rank[rank], span, highest)) for rank in chosen]
    return Silences(curves, len(longest), is_seen, highest)


def _draw(silences: list[tuple[float, float]], span: Span, highest: float) -> str:
    parts, at = [f"M0 {HEIGHT:g}"], 0.0
    kept = sorted(sorted(silences, key=lambda silence: -silence[1])[:_POINTS])
    for end, seconds in kept:
        left, right = max(at, span.place(end - seconds)), span.place(end)
        parts.append(f"H{left:.1f}L{right:.1f} {HEIGHT * (1 - seconds / highest):.1f}V{HEIGHT:g}")
        at = right
    return "".join((*parts, f"H{SCALE:g}"))
