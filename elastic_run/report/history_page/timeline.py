"""The rounds of each node on one scale of time: a row for each node, in it the phases of its rounds.

Pure. Positions are parts of a thousand of the time from the first to the last line, so a page of any width shows them.
"""

from __future__ import annotations

import re

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

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
#: After the last line of a killed launcher: its workers may have run as long as the round.
UNSEEN = "unseen"
PHASES = (RUNNING, STARTING, WAITING, STOPPING)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a round on one node.

    Args:
        kind: A kind of `PHASES`.
        left: Its begin on the scale.
        width: Its width on the scale.
        title: Text that is shown when the reader points at it.
    """

    kind: str
    left: float
    width: float
    title: str


@dataclass(slots=True)
class Row:
    """One node.

    Args:
        label: The node's name.
        phases: The phases in their order.
        failures: Places on the scale at which workers failed first, each with a text.
        ends: Places on the scale at which the lines of a launcher stop without its last event.
        until: Wall clock of the last line of its last launcher.
    """

    label: str
    phases: list[Phase] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    until: float = 0.0


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
