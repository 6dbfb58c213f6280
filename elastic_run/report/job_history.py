"""The history of a job from the event logs below a directory: launchers, rounds, members, workers.

A log may end in the middle of a line, lack any part, and contain anything: none of that is an error, and lines that are
not events are counted and named. The events of each launcher are taken in their order, and the parts of a round on
several nodes are joined by the round's number and id. Times are wall clocks of the nodes, in seconds since the epoch,
for display.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from elastic_run.contract import EVENTS_FILE
from elastic_run.files import open_user_file, read_user_file
from elastic_run.records import dataclass, field
from elastic_run.report.event_log import find_mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader
    from typing import Any, TypeAlias

    Event: TypeAlias = dict[str, Any]

# --- reading ----------------------------------------------------------------------------------------------------------
#: Bytes that are read of a line at most; no line of an event log is longer.
LINE_LIMIT = 1 << 16


@dataclass(slots=True)
class Mistakes:
    """Lines of a file that are not events."""

    file: str
    count: int
    first_line: int  # Number of the first such line
    reason: str  # Why that line is no event


def read_lines(file: BufferedReader) -> Iterator[bytes]:
    """Return the lines of an event log; a line that is longer than any event is cut."""
    while line := file.readline(LINE_LIMIT + 1):
        yield line
        while len(line) > LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT + 1)


def read_events(lines: Iterable[bytes], file: str) -> tuple[list[Event], Mistakes | None]:
    """Return the events of lines, and the lines that are not events; empty lines don't count."""
    events, mistakes = [], None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        document, reason = _parse(line)
        if not reason:
            events.append(document)
        elif mistakes is None:
            mistakes = Mistakes(file, 1, number, reason)
        else:
            mistakes.count += 1
    return events, mistakes


def _parse(line: bytes) -> tuple[Event, str]:
    if len(line) > LINE_LIMIT:
        return {}, "is longer than any event"
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "is not a whole line of JSON"
    return document, find_mistake(document)


#: Depth of the search below the user's directory: runs, attempts, ranks.
_DEPTH = 3
#: Bytes of an event log that are read, its last ones. A longer log is of years, or a copy of it has a hole.
_LONGEST = 128 << 20
#: Files of stacks that the page shows, and bytes of each.
_STACKS = 20
_STACK_BYTES = 64 * 1024


@dataclass(slots=True)
class Logs:
    """The event logs and stacks of a directory."""

    files: list[str] = field(default_factory=list)  # Paths of the event logs that could be read
    events: list[Event] = field(default_factory=list)  # Their events, file by file
    mistakes: list[Mistakes] = field(default_factory=list)  # Lines that are not events
    problems: list[str] = field(default_factory=list)  # Files that could not be read, or only in part, a clause each
    stacks: list[tuple[str, str]] = field(default_factory=list)  # Path and text of each file of stacks


def read_logs(place: str) -> Logs:
    """Read an event log, or all below a directory.

    Raises:
        OSError: The place isn't there, or may not be read.
    """
    logs = Logs()
    if not os.path.isdir(place):
        _check_kind(place, allows_pipe=True)  # as the shell's <(command)
        _read_events(place, logs)
        return logs
    os.listdir(place)
    for path in sorted(_find_files(place, 0)):
        name = os.path.basename(path)
        if name == EVENTS_FILE:
            _read_log(path, logs)
        elif len(logs.stacks) < _STACKS:
            _read_stacks(path, logs)
    return logs


def _find_files(directory: str, depth: int) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth < _DEPTH:
                yield from _find_files(entry.path, depth + 1)
        elif entry.name == EVENTS_FILE or (entry.name.startswith("stacks") and entry.name.endswith(".txt")):
            yield entry.path


def _read_log(path: str, logs: Logs) -> None:
    try:
        _check_kind(path)
        _read_events(path, logs)
    except OSError as error:
        logs.problems.append(f"{path} can't be read: {error.strerror}")


def _check_kind(path: str, *, allows_pipe: bool = False) -> None:
    """Raise OSError for a device, which may have no end, and for a pipe that the user has not named."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (allows_pipe and stat.S_ISFIFO(mode))):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _read_events(path: str, logs: Logs) -> None:
    with open_user_file(path) as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe 0
        if size > _LONGEST:
            file.seek(size - _LONGEST)
            next(read_lines(file), None)  # the rest of a line
            logs.problems.append(f"{path} has {size >> 20} MiB: only the last {_LONGEST >> 20} MiB are read")
        events, mistakes = read_events(read_lines(file), path)
    logs.files.append(path)
    logs.events += events
    if mistakes is not None:
        logs.mistakes.append(mistakes)


def _read_stacks(path: str, logs: Logs) -> None:
    try:
        _check_kind(path)
        data = read_user_file(path, _STACK_BYTES + 1)
    except OSError as error:
        logs.problems.append(f"{path} can't be read: {error.strerror}")
        return
    cut = "\n..." if len(data) > _STACK_BYTES else ""
    logs.stacks.append((path, data[:_STACK_BYTES].decode(errors="replace") + cut))


# --- the records ------------------------------------------------------------------------------------------------------
#: Events of a round that its records keep, of several of a name the last.
_OF_MEMBER = frozenset(("workers_started", "workers_stopping", "workers_stopped", "hang_found"))
_OF_WORKER = frozenset(("worker_started", "first_output", "silence", "worker_exited", "worker_failed"))


@dataclass(slots=True)
class Worker:
    """One worker in one round."""

    rank: int
    events: dict[str, Event] = field(default_factory=dict)  # By their names; a line may be missing
    #: Wall clock at the end of each silence, and its seconds; the last ends with the worker
    silences: list[tuple[float, float]] = field(default_factory=list)
    #: Wall clock, seconds of processor time since the start, and resident MiB, at several moments
    readings: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Member:
    """One node's part in one round."""

    formed: Event  # Its event `round_formed`
    last_at: float  # Wall clock of the node's last line about the round
    events: dict[str, Event] = field(default_factory=dict)  # The others by their names; a line may be missing
    workers: dict[int, Worker] = field(default_factory=dict)  # By global rank
    #: Wall clock, and percent of a minute in which the others waited for each rank, at several moments
    waits: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)  # The lines about slow ranks

    @property
    def node(self) -> str:
        """The node's name."""
        return str(self.formed["node"])


def moment(of: Member | Worker, event: str, default: float) -> float:
    """Return the wall clock of an event, or the default if its line is missing."""
    return float(of.events[event]["time"]) if event in of.events else default


@dataclass(slots=True)
class Round:
    """One round of a job."""

    formed: Event  # The event `round_formed` of one of its nodes
    members: dict[int, Member]  # The nodes whose logs were read, by node rank

    @property
    def number(self) -> int:
        """The round's number."""
        return self.formed["round"] or 0

    @property
    def workers(self) -> list[tuple[Member, Worker]]:
        """The workers whose logs were read, with their nodes."""
        return [(member, worker) for member in self.members.values() for worker in member.workers.values()]


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
    rounds: list[Round] = field(default_factory=list)  # Its own part in each

    @property
    def job(self) -> str:
        """Unique id of its job, since jobs may share a run id; its own id before its first round."""
        return str(self.rounds[-1].formed["job"]) if self.rounds else self.name

    def add(self, event: Event) -> None:
        """Take the next event."""
        name = event["event"]
        self.last_at = max(self.last_at, event["time"])
        if name == "agent_started":
            self.started = event
        elif name == "agent_ended":
            self.ended = event
        elif name == "lines_lost":
            self.lost_lines += event["lines"]
        elif name == "round_formed":
            node_rank = event["node_rank"]
            self.rounds.append(Round(event, {node_rank: Member(event, event["time"])}))
        # Where the line that begins a round is missing, its other events belong to no round.
        if self.rounds and name not in ("rendezvous_started", "agent_ended"):
            latest = self.rounds[-1]
            if event["round"] in (None, latest.number):
                (member,) = latest.members.values()
                _add_to_member(member, name, event)


@dataclass(slots=True)
class Job:
    """One job as its event logs tell it."""

    run_id: str  # Its id
    agents: list[Agent]  # Its launchers, the first to start first
    rounds: list[Round]  # In their order

    @property
    def restarts(self) -> int:
        """Restarts that the job has made."""
        return max((each.formed["restart"] for each in self.rounds), default=0)

    @property
    def verdict(self) -> str:
        """How the job ended, as most launchers of its last round say; "" where no log tells."""
        last = {member.formed["agent"] for member in self.rounds[-1].members.values()} if self.rounds else set()
        told = [agent for agent in self.agents if agent.ended is not None]
        of_last = [agent for agent in told if agent.name in last] or told
        verdicts = [agent.ended["verdict"] for agent in of_last if agent.ended is not None]
        return max(verdicts, key=verdicts.count, default="")


def fold(events: Iterable[Event]) -> list[Job]:
    """Fold events into jobs, those of each launcher in their order; a repeated event counts once."""
    agents: dict[str, Agent] = {}
    first: dict[str, Event] = {}
    seen: set[tuple[str, float, str, Any]] = set()
    for event in events:
        name = event["agent"]
        key = (name, event["monotonic"], event["event"], event.get("rank"))
        if key in seen:
            continue
        seen.add(key)
        # The wall clock of the launcher's first event, carried on by its monotonic clock: a wall clock that is set
        # while the job runs would stretch the rounds of the page by days.
        began = first.setdefault(name, event)
        moved = {**event, "time": began["time"] + event["monotonic"] - began["monotonic"]}
        agent = agents.get(name)
        if agent is None:
            agent = agents[name] = Agent(name, event["node"], event["run_id"], event["time"], event["time"])
        agent.add(moved)
    return [_join(group) for group in _group_by_job(sorted(agents.values(), key=lambda agent: agent.first_at))]


def _group_by_job(agents: list[Agent]) -> Iterator[list[Agent]]:
    """Group the launchers by job; a launcher that was in no round belongs to the last job of its run id, if any."""
    groups: dict[tuple[str, str], list[Agent]] = {}
    for agent in sorted(agents, key=lambda agent: not agent.rounds):
        of_id = [key for key in groups if key[0] == agent.run_id]
        key = of_id[-1] if of_id and not agent.rounds else (agent.run_id, agent.job)
        groups.setdefault(key, []).append(agent)
    yield from sorted(groups.values(), key=lambda group: min(agent.first_at for agent in group))


def _join(agents: list[Agent]) -> Job:
    rounds: dict[tuple[int, str], Round] = {}
    for found in (found for agent in agents for found in agent.rounds):
        known = rounds.setdefault((found.number, found.formed["round_id"]), Round(found.formed, {}))
        known.members.update(found.members)
    begun = {key: min(member.formed["time"] for member in found.members.values()) for key, found in rounds.items()}
    ordered = [rounds[key] for key in sorted(rounds, key=lambda key: (key[0], begun[key]))]
    return Job(agents[0].run_id, sorted(agents, key=lambda agent: agent.first_at), ordered)


def _add_to_member(member: Member, name: str, event: Event) -> None:
    member.last_at = event["time"]
    if name in _OF_MEMBER:
        member.events[name] = event
    elif name == "resources":
        for rank, cpu, memory in zip(event["ranks"], event["cpu_s"], event["memory_mib"], strict=False):
            if rank in member.workers:
                member.workers[rank].readings.append((event["time"], cpu, memory))
    elif name == "waits":
        member.waits.append((event["time"], dict(zip(event["ranks"], event["behind"], strict=False))))
    elif name == "slow_rank_found":
        member.slow.append(event["detail"])
    elif name in _OF_WORKER:
        worker = member.workers.setdefault(event["rank"], Worker(event["rank"]))
        worker.events[name] = event
        if name in ("silence", "worker_exited"):
            worker.silences.append((event["time"], event["silence_s"]))
