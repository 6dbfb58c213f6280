"""The drawings of the history page: the rounds of each node, the silences and the resources of each rank.

Pure. All have one scale of time: positions are parts of a thousand of the time from the first to the last line, so a
page of any width shows them.
"""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import mean, median

from elastic_run.records import dataclass, field
from elastic_run.report.text import span as describe_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_run.report.job_history import Agent, Job, Member, Reading

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
#: After the last line of a killed launcher: its workers may have run as long as the round.
UNSEEN = "unseen"
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
    yield WAITING, member.formed_at - member.rendezvous_s, member.formed_at
    started = member.started_at if member.started_at is not None else member.stopping_at or member.last_at
    yield STARTING, member.formed_at, started
    if member.started_at is not None:
        stopping = member.stopping_at if member.stopping_at is not None else member.last_at
        yield RUNNING, started, stopping
    if member.stopping_at is not None:
        stopped = member.stopped_at if member.stopped_at is not None else member.last_at
        yield STOPPING, member.stopping_at, stopped


def draw_rows(job: Job, span: Span) -> list[Row]:
    """Return a row for each node; launchers that followed each other on a host share one."""
    rows: dict[str, list[Row]] = {}
    of_agent: dict[str, Row] = {}
    for agent in job.agents:
        row = _find_row(rows.setdefault(agent.node, []), agent)
        row.until = agent.last_at
        of_agent[agent.name] = row
    unseen: dict[str, float] = {}
    for each in job.rounds:
        title = f"round {each.number}, restart {each.restart}"
        last = max((member.stopping_at or member.last_at for member in each.members.values()), default=0.0)
        for member in each.members.values():
            row = of_agent[member.agent]
            _draw_member(row, member, span, title)
            if member.started_at is not None and member.stopping_at is None:
                left = span.place(member.last_at)
                unseen[member.agent] = (left + span.place(last)) / 2
                row.phases.append(Phase(UNSEEN, round(left, 2), round(span.place(last) - left, 2), f"{title}: unknown"))
    for agent in (agent for agent in job.agents if agent.ended is None):
        of_agent[agent.name].ends.append(round(unseen.get(agent.name, span.place(agent.last_at)), 1))
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
        if worker.failure is not None and worker.failure["is_root"]:
            place = round(span.place(worker.ended_at or member.last_at), 1)
            if not row.failures or place - row.failures[-1][0] >= _LEAST:
                row.failures.append((place, f"{title}: rank {worker.rank} failed"))


def add_phases(job: Job) -> dict[str, float]:
    """Return the seconds of each phase, of all nodes together."""
    sums = dict.fromkeys(PHASES, 0.0)
    for each in job.rounds:
        for member in each.members.values():
            for kind, begin, end in phases_of(member):
                sums[kind] += max(0.0, end - begin)
    return sums


#: Height of a drawing in its own units, curves in it, points of a curve, and seconds below which a silence is none.
HEIGHT = 120.0
_CURVES = 6
_POINTS = 400
_LEAST_SILENCE = 10.0

#: Values of one worker in one round: wall clock and value.
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One rank in a drawing."""

    rank: int  # Its global rank
    text: str  # Its average or its highest value, in words
    path: str  # The drawing's path


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing."""

    title: str  # The title of the curves
    top: str  # The highest value, in words
    curves: list[Curve]  # The ranks that stand out most
    others: int  # Number of ranks that are not drawn


def draw_silences(job: Job, span: Span) -> tuple[Chart, bool]:
    """Return how long each rank was silent, and whether the stdout of any rank was seen.

    A curve rises while its rank writes nothing, and falls when the rank writes. The event log has silences of ten
    seconds and more, and those at the end of a worker.
    """
    of_rank: dict[int, list[tuple[float, float]]] = {}
    is_seen = False
    for each in job.rounds:
        for member in each.members.values():
            for worker in member.workers.values():
                is_seen = is_seen or worker.is_output_seen
                if worker.is_output_seen:
                    long = [silence for silence in worker.silences if silence[1] >= _LEAST_SILENCE]
                    of_rank.setdefault(worker.rank, []).extend(long)
    longest = {rank: max(seconds for _, seconds in found) for rank, found in of_rank.items() if found}
    highest = max(longest.values(), default=0.0)
    chosen = sorted(longest, key=lambda rank: (-longest[rank], rank))[:_CURVES]
    curves = [
        Curve(rank, describe_span(longest[rank]), _draw_silences(of_rank[rank], span, highest)) for rank in chosen
    ]
    return Chart("Silence", describe_span(highest), curves, len(longest) - len(curves)), is_seen


def _draw_silences(silences: list[tuple[float, float]], span: Span, highest: float) -> str:
    parts, at = [f"M0 {HEIGHT:g}"], 0.0
    kept = sorted(sorted(silences, key=lambda silence: -silence[1])[:_POINTS])
    for end, seconds in kept:
        left, right = max(at, span.place(end - seconds)), span.place(end)
        parts.append(f"H{left:.1f}L{right:.1f} {HEIGHT * (1 - seconds / highest):.1f}V{HEIGHT:g}")
        at = right
    return "".join((*parts, f"H{SCALE:g}"))


def draw_resources(job: Job, span: Span) -> list[Chart]:
    """Return what each rank used, processor time and memory; nothing where no worker has two readings.

    Between two readings the curves are straight lines, and between the rounds there are none.
    """
    cpu: dict[int, list[Points]] = {}
    memory: dict[int, list[Points]] = {}
    for each in job.rounds:
        for member in each.members.values():
            for worker in member.workers.values():
                if len(worker.readings) > 1:
                    cpu.setdefault(worker.rank, []).append(_find_shares(worker.readings))
                    memory.setdefault(worker.rank, []).append([(each.at, each.memory) for each in worker.readings])
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
