"""The drawings of the history page: the rounds of each node, the silences and the resources of each rank.

Pure. All have one scale of time: positions are parts of a thousand of the time from the first to the last line, so a
page of any width shows them.
"""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import mean, median

from elastic_run.records import dataclass, field
from elastic_run.report.job_history import moment
from elastic_run.report.text import span as describe_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_run.report.job_history import Agent, Job, Member

#: Units of the scale, and the least width of a phase in them.
SCALE = 1000.0
_LEAST = 2.0
#: Rows that are drawn: nodes with failures first.
ROWS = 64

# Kinds of phases, which are also classes of the page's style.
WAITING = "waiting"
STARTING = "starting"
RUNNING = "running"
STOPPING = "stopping"
PHASES = (RUNNING, STARTING, WAITING, STOPPING)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a round on one node."""

    kind: str  # A kind of `PHASES`
    left: float  # Its begin on the scale
    width: float  # Its width on the scale
    title: str  # Text that is shown when the reader points at it


@dataclass(slots=True)
class Row:
    """One node."""

    label: str  # The node's name
    phases: list[Phase] = field(default_factory=list)  # The phases in their order
    #: Places on the scale at which workers failed first, each with a text
    failures: list[tuple[float, str]] = field(default_factory=list)
    #: Places on the scale at which the lines of a launcher stop without its last event
    ends: list[float] = field(default_factory=list)
    until: float = 0.0  # Wall clock of the last line of its last launcher


@dataclass(frozen=True, slots=True)
class Span:
    """The time that the page shows, in seconds since the epoch."""

    first: float
    last: float

    def place(self, time: float) -> float:
        """Return a time's place on the scale."""
        return SCALE * (min(max(time, self.first), self.last) - self.first) / max(self.last - self.first, 1e-6)


def find_span(job: Job) -> Span:
    """Return the time from the first to the last line of a job."""
    return Span(min(agent.first_at for agent in job.agents), max(agent.last_at for agent in job.agents))


def phases_of(member: Member) -> Iterator[tuple[str, float, float]]:
    """Return the phases of a node's round: kind, begin and end in seconds since the epoch."""
    formed = member.formed["time"]
    stopping = moment(member, "workers_stopping", member.last_at)
    started = moment(member, "workers_started", stopping)
    yield WAITING, formed - member.formed["rendezvous_s"], formed
    yield STARTING, formed, started
    if "workers_started" in member.events:
        yield RUNNING, started, stopping
    if "workers_stopping" in member.events:
        yield STOPPING, stopping, moment(member, "workers_stopped", member.last_at)


def draw_rows(job: Job, span: Span) -> list[Row]:
    """Return a row for each node; launchers that followed each other on a host share one."""
    rows: dict[str, list[Row]] = {}
    of_agent: dict[str, Row] = {}
    for agent in job.agents:
        row = _find_row(rows.setdefault(agent.node, []), agent)
        row.until = agent.last_at
        of_agent[agent.name] = row
    for each in job.rounds:
        title = f"round {each.number}, restart {each.formed['restart']}"
        for member in each.members.values():
            _draw_member(of_agent[member.formed["agent"]], member, span, title)
    for agent in (agent for agent in job.agents if agent.ended is None):
        of_agent[agent.name].ends.append(round(span.place(agent.last_at), 1))
    drawn = sorted((row for of_host in rows.values() for row in of_host), key=lambda row: _natural(row.label))
    return sorted(drawn, key=lambda row: not row.failures) if len(drawn) > ROWS else drawn


def _natural(label: str) -> list[tuple[int, str]]:
    """Return a key that puts node2 before node10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d{0,15})", label)]


def _find_row(of_host: list[Row], agent: Agent) -> Row:
    """Return the host's first row whose launcher had ended when this launcher began, or a new row."""
    row = next((row for row in of_host if row.until <= agent.first_at), None)
    if row is None:
        row = Row(agent.node if not of_host else f"{agent.node} ({len(of_host) + 1})")
        of_host.append(row)
    return row


def _draw_member(row: Row, member: Member, span: Span, title: str) -> None:
    for kind, begin, end in phases_of(member):
        left, right = span.place(begin), span.place(end)
        is_seen = right - left >= _LEAST / 2 or kind == RUNNING
        if not is_seen or (row.phases and right <= row.phases[-1].left + row.phases[-1].width):
            continue  # narrower than can be seen: of thousands of rounds only as many as fit are drawn
        row.phases.append(Phase(kind, round(left, 2), round(max(right - left, _LEAST), 2), f"{title}: {kind}"))
    for worker in member.workers.values():
        if "worker_failed" in worker.events and worker.events["worker_failed"]["is_root"]:
            place = round(span.place(moment(worker, "worker_exited", member.last_at)), 1)
            if not row.failures or place - row.failures[-1][0] >= _LEAST:
                row.failures.append((place, f"{title}: rank {worker.rank} failed"))


#: Height of a drawing in its own units, curves in it, points of a curve, and seconds below which a silence is none.
HEIGHT = 120.0
_CURVES = 6
_POINTS = 400
_LEAST_SILENCE = 10.0
_MIB_OF_GIB = 1024

#: Curves of a rank, each a list of wall clock and value: between two curves nothing is drawn.
Curves = list[list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing."""

    title: str  # The title of the curves
    top: str  # The highest value, in words
    curves: list[tuple[int, str, str]]  # The ranks that stand out most: rank, its value in words, and path
    others: int  # Number of ranks that are not drawn


def draw_silences(job: Job, span: Span) -> Chart | None:
    """Return how long each rank was silent, or None if no rank's stdout was seen.

    A curve rises while its rank writes nothing, and falls when the rank writes. The event log has silences of ten
    seconds and more, and those at the end of a worker.
    """
    of_rank: dict[int, list[tuple[float, float]]] = {}
    for worker in (worker for each in job.rounds for _, worker in each.workers):
        if worker.events.get("worker_started", {}).get("is_output_seen"):
            of_rank.setdefault(worker.rank, []).extend(
                silence for silence in worker.silences if silence[1] >= _LEAST_SILENCE
            )
    if not of_rank:
        return None
    longest = {rank: max(seconds for _, seconds in found) for rank, found in of_rank.items() if found}
    chosen = {rank: sorted(of_rank[rank], key=lambda silence: -silence[1])[: _POINTS // 3] for rank in longest}
    curves = {
        rank: [[(end - seconds, 0.0), (end, seconds), (end, 0.0)] for end, seconds in sorted(found)]
        for rank, found in chosen.items()
    }
    return _draw_chart(
        "Silence", curves, longest, span, {rank: describe_span(value) for rank, value in longest.items()}
    )


def draw_resources(job: Job, span: Span) -> list[Chart]:
    """Return what each rank used, processor time and memory; nothing where no worker has two readings.

    Between two readings the curves are straight lines, and between the rounds there are none.
    """
    cpu: dict[int, Curves] = {}
    memory: dict[int, Curves] = {}
    for worker in (worker for each in job.rounds for _, worker in each.workers):
        if len(worker.readings) > 1:
            shares = [
                (after[0], max(0.0, 100 * (after[1] - before[1]) / max(after[0] - before[0], 1e-3)))
                for before, after in pairwise(worker.readings)
            ]
            cpu.setdefault(worker.rank, []).append([(worker.readings[0][0], shares[0][1]), *shares])
            memory.setdefault(worker.rank, []).append([(at, mib) for at, _, mib in worker.readings])
    if not cpu:
        return []
    averages = {rank: mean(value for curve in curves for _, value in curve) for rank, curves in cpu.items()}
    middle = median(averages.values())
    unlike = {rank: abs(average - middle) for rank, average in averages.items()}
    peaks = {rank: _find_highest(curves) for rank, curves in memory.items()}
    used = {rank: f"{average:.0f} % on average" for rank, average in averages.items()}
    sizes = {rank: _describe_size(peak) for rank, peak in peaks.items()}
    return [
        _draw_chart("Processor time", cpu, unlike, span, used),
        _draw_chart("Memory", memory, peaks, span, sizes),
    ]


def _draw_chart(
    title: str, values: dict[int, Curves], worth: Mapping[int, float], span: Span, words: Mapping[int, str]
) -> Chart:
    """Draw the ranks that are worth most; in a small job each rank has the same colour in all drawings."""
    chosen = sorted(sorted(values, key=lambda rank: (-worth[rank], rank))[:_CURVES])
    highest = max((1.0, *(_find_highest(values[rank]) for rank in chosen)))
    describe = {"Silence": describe_span, "Memory": _describe_size}.get(title, "{:.0f} %".format)
    curves = [(rank, words[rank], _draw(values[rank], span, highest)) for rank in chosen]
    return Chart(title, describe(highest), curves, len(values) - len(chosen))


def _draw(curves: Curves, span: Span, highest: float) -> str:
    step = 1 + sum(map(len, curves)) // _POINTS
    return "".join(
        f"{'L' if index else 'M'}{span.place(at):.1f} {HEIGHT * (1 - value / highest):.1f}"
        for curve in curves
        for index, (at, value) in enumerate([*curve[:-1:step], curve[-1]])
    )


def _find_highest(curves: Curves) -> float:
    return max(value for curve in curves for _, value in curve)


def _describe_size(mib: float) -> str:
    return f"{mib / _MIB_OF_GIB:.1f} GiB" if mib >= _MIB_OF_GIB else f"{mib:.0f} MiB"
