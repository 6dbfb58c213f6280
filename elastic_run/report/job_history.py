"""The history of a job from its event logs: launchers, rounds, members, workers.

Pure: events go in, records come out. A log may lack any part; the events of each launcher are taken in their order, and
the parts of a round on several nodes are joined by the round's number and id. Times are wall clocks of the nodes, in
seconds since the epoch, for display.
"""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, TypeAlias

    Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """The resources that a worker had used at one moment."""

    at: float  # Wall clock
    cpu: float  # Seconds of processor time since its start
    memory: float  # Resident MiB


@dataclass(slots=True)
class Worker:
    """One worker in one round."""

    rank: int  # Its global rank
    pid: int  # Its pid
    is_output_seen: bool = False  # Whether its stdout passed through the launcher
    started_at: float | None = None  # Wall clock, or None if the line is missing
    first_output_s: float | None = None  # Seconds from the start to its first output, or None
    ended_at: float | None = None  # Wall clock; None while it runs, or if its launcher was killed before
    exit_code: int | None = None  # Its exit code, or None
    signal: str | None = None  # Name of the signal that ended it, or None
    was_stopped: bool = False  # Whether the launcher had told it to stop
    #: Wall clock at the end of each silence, and its seconds; the last ends with the worker
    silences: list[tuple[float, float]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # The resources that it had used, at several moments
    failure: Event | None = None  # Its event `worker_failed`, or None


@dataclass(slots=True)
class Member:
    """One node's part in one round; times are the node's wall clock, None if the line is missing."""

    agent: str  # Id of the node's launcher
    node: str  # Name of the node
    node_rank: int  # Rank of the node in the round
    formed_at: float  # Time at which the node had its place
    rendezvous_s: float  # Seconds that the node waited for its place
    started_at: float | None = None  # Time at which its workers ran
    recovery_s: float | None = None  # Seconds since the failure of the round before
    stopping_at: float | None = None  # Time at which the node began to stop its workers
    stop_reason: str = ""  # Reason of the stop: `failure`, `halt`, `signal`, `success`, or ""
    detail: str = ""  # The reason in words, or ""
    detected_s: float | None = None  # Seconds from the failure to the begin of the stop
    stopped_at: float | None = None  # Time at which no worker was left
    last_at: float = 0.0  # Time of the node's last line about the round
    workers: dict[int, Worker] = field(default_factory=dict)  # The workers by global rank
    hang: Event | None = None  # Its event `hang_found`, or None


@dataclass(slots=True)
class Round:
    """One round of a job."""

    number: int  # Its number
    round_id: str  # The unique id of the round, "" for a job of one node
    restart: int  # Restarts of the job when it was formed
    nodes: int  # Nodes in it
    workers: int  # Workers in it
    reason: str  # Why the round was formed, or ""
    members: dict[int, Member] = field(default_factory=dict)  # The nodes whose logs were read, by node rank


@dataclass(slots=True)
class Agent:
    """One launcher."""

    name: str  # Its id
    node: str  # Its host
    run_id: str  # The job's id
    first_at: float  # Wall clock of its first line
    last_at: float  # Wall clock of its last line
    started: Event | None = None  # Its event `agent_started`, or None
    ended: Event | None = None  # Its event `agent_ended`; None if it runs, was killed, or the end of its log is missing
    lost_lines: int = 0  # Lines that it could not write
    job: str = ""  # Unique id of its job, since jobs may share a run id; "" before its first round


@dataclass(slots=True)
class Job:
    """One job as its event logs tell it."""

    run_id: str  # Its id
    agents: list[Agent]  # Its launchers, the first to start first
    rounds: list[Round]  # In their order

    @property
    def restarts(self) -> int:
        """Restarts that the job has made."""
        return max((each.restart for each in self.rounds), default=0)

    @property
    def verdict(self) -> str:
        """How the job ended, as most launchers of its last round say; "" where no log tells."""
        last = {member.agent for member in self.rounds[-1].members.values()} if self.rounds else set()
        told = [agent for agent in self.agents if agent.ended is not None]
        of_last = [agent for agent in told if agent.name in last] or told
        verdicts = [agent.ended["verdict"] for agent in of_last if agent.ended is not None]
        return max(verdicts, key=verdicts.count, default="")


def fold(events: Iterable[Event]) -> list[Job]:
    """Fold events into jobs, those of each launcher in their order; a repeated event counts once."""
    of_agent: dict[str, _AgentFold] = {}
    seen: set[tuple[str, float, str, Any]] = set()
    for event in _follow_monotonic_clocks(events):
        key = (event["agent"], event["monotonic"], event["event"], event.get("rank"))
        if key not in seen:
            seen.add(key)
            of_agent.setdefault(event["agent"], _AgentFold(event)).add(event)
    folds = sorted(of_agent.values(), key=lambda each: each.agent.first_at)
    return [_join(list(group)) for group in _group_by_job(folds)]


def _group_by_job(folds: list[_AgentFold]) -> Iterator[list[_AgentFold]]:
    """Group the launchers by job; a launcher that was in no round belongs to the last job of its run id, if any."""
    groups: dict[tuple[str, str], list[_AgentFold]] = {}
    for each in (each for each in folds if each.rounds):
        groups.setdefault((each.agent.run_id, each.agent.job), []).append(each)
    for each in (each for each in folds if not each.rounds):
        of_id = [key for key in groups if key[0] == each.agent.run_id and key[1] != each.agent.name]
        groups.setdefault(of_id[-1] if of_id else (each.agent.run_id, each.agent.name), []).append(each)
    yield from sorted(groups.values(), key=lambda group: min(each.agent.first_at for each in group))


def _join(folds: list[_AgentFold]) -> Job:
    rounds: dict[tuple[int, str], Round] = {}
    for each in folds:
        for found in each.rounds:
            known = rounds.setdefault((found.number, found.round_id), found)
            known.members.update(found.members)
    ordered = sorted(rounds.values(), key=lambda each: (each.number, min(m.formed_at for m in each.members.values())))
    agents = sorted((each.agent for each in folds), key=lambda agent: agent.first_at)
    return Job(agents[0].run_id, agents, ordered)


class _AgentFold:
    """Folds the events of one launcher."""

    def __init__(self, first: Event) -> None:
        self.agent = Agent(first["agent"], first["node"], first["run_id"], first["time"], first["time"])
        self.rounds: list[Round] = []
        self._latest: Member | None = None
        self._member: Member | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        self.agent.last_at = max(self.agent.last_at, event["time"])
        # Of another round: the line that begins it is missing.
        is_of_latest = bool(self.rounds) and event["round"] in (None, self.rounds[-1].number)
        self._member = self._latest if is_of_latest else None
        add = getattr(self, f"_add_{event['event']}", None)
        if add is not None:
            add(event)
        if self._member is not None and event["event"] not in ("rendezvous_started", "agent_ended"):
            self._member.last_at = event["time"]

    def _add_agent_started(self, event: Event) -> None:
        self.agent.started = event

    def _add_agent_ended(self, event: Event) -> None:
        self.agent.ended = event

    def _add_lines_lost(self, event: Event) -> None:
        self.agent.lost_lines += event["lines"]

    def _add_round_formed(self, event: Event) -> None:
        self.agent.job = event["job"]
        self._latest = self._member = Member(
            self.agent.name, self.agent.node, event["node_rank"], event["time"], event["rendezvous_s"]
        )
        found = Round(
            event["round"] or 0,
            event["round_id"],
            event["restart"],
            event["nodes"],
            event["workers"],
            event["reason"],
            {event["node_rank"]: self._member},
        )
        self.rounds.append(found)

    def _add_workers_started(self, event: Event) -> None:
        if self._member is not None:
            self._member.started_at, self._member.recovery_s = event["time"], event["recovery_s"]

    def _add_workers_stopping(self, event: Event) -> None:
        if self._member is not None:
            self._member.stopping_at, self._member.stop_reason = event["time"], event["reason"]
            self._member.detail, self._member.detected_s = event["detail"], event["detected_s"]

    def _add_workers_stopped(self, event: Event) -> None:
        if self._member is not None:
            self._member.stopped_at = event["time"]

    def _find_worker(self, event: Event) -> Worker:
        # Without a member the line of the round is missing.
        workers = {} if self._member is None else self._member.workers
        return workers.setdefault(event["rank"], Worker(event["rank"], event["pid"]))

    def _add_worker_started(self, event: Event) -> None:
        worker = self._find_worker(event)
        worker.started_at, worker.is_output_seen = event["time"], event["is_output_seen"]

    def _add_first_output(self, event: Event) -> None:
        self._find_worker(event).first_output_s = event["after_s"]

    def _add_silence(self, event: Event) -> None:
        self._find_worker(event).silences.append((event["time"], event["silence_s"]))

    def _add_resources(self, event: Event) -> None:
        workers = {} if self._member is None else self._member.workers
        for rank, cpu, memory in zip(event["ranks"], event["cpu_s"], event["memory_mib"], strict=False):
            if rank in workers:
                workers[rank].readings.append(Reading(event["time"], cpu, memory))

    def _add_hang_found(self, event: Event) -> None:
        if self._member is not None:
            self._member.hang = event

    def _add_worker_exited(self, event: Event) -> None:
        worker = self._find_worker(event)
        worker.ended_at, worker.was_stopped = event["time"], event["was_stopped"]
        worker.exit_code, worker.signal = event["exit_code"], event["signal"]
        worker.silences.append((event["time"], event["silence_s"]))

    def _add_worker_failed(self, event: Event) -> None:
        self._find_worker(event).failure = event


def _follow_monotonic_clocks(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events with the wall clock of their launcher's first event, carried on by its monotonic clock.

    A wall clock that is set while the job runs would stretch the rounds of the page by days.
    """
    first: dict[str, Event] = {}
    for event in events:
        began = first.setdefault(event["agent"], event)
        yield {**event, "time": began["time"] + event["monotonic"] - began["monotonic"]}
