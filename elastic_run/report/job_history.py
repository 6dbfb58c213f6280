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

    file: str  # Name of the file
    count: int  # Number of such lines
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


#: What events say of a node's part in a round, and of a worker: for each field of the record the key in the event.
_OF_MEMBER = {
    "workers_started": {"started_at": "time", "recovery_s": "recovery_s"},
    "workers_stopping": {
        "stopping_at": "time",
        "stop_reason": "reason",
        "detail": "detail",
        "detected_s": "detected_s",
    },
    "workers_stopped": {"stopped_at": "time"},
}
_OF_WORKER = {
    "worker_started": {"started_at": "time", "is_output_seen": "is_output_seen"},
    "first_output": {"first_output_s": "after_s"},
    "silence": {},
    "worker_exited": {"ended_at": "time", "was_stopped": "was_stopped", "exit_code": "exit_code", "signal": "signal"},
    "worker_failed": {},
}


class _AgentFold:
    """Folds the events of one launcher."""

    def __init__(self, first: Event) -> None:
        self.agent = Agent(first["agent"], first["node"], first["run_id"], first["time"], first["time"])
        self.rounds: list[Round] = []
        self._latest: Member | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        name, agent = event["event"], self.agent
        agent.last_at = max(agent.last_at, event["time"])
        if name == "agent_started":
            agent.started = event
        elif name == "agent_ended":
            agent.ended = event
        elif name == "lines_lost":
            agent.lost_lines += event["lines"]
        elif name == "round_formed":
            self._add_round(event)
        if name in ("rendezvous_started", "agent_ended"):
            return
        # An event of another round: the line that begins its round is missing.
        if self._latest is not None and event["round"] in (None, self.rounds[-1].number):
            self._latest.last_at = event["time"]
            _add_to_member(self._latest, name, event)

    def _add_round(self, event: Event) -> None:
        node_rank = event["node_rank"]
        self.agent.job = event["job"]
        self._latest = Member(self.agent.name, self.agent.node, node_rank, event["time"], event["rendezvous_s"])
        found = Round(
            number=event["round"] or 0,
            round_id=event["round_id"],
            restart=event["restart"],
            nodes=event["nodes"],
            workers=event["workers"],
            reason=event["reason"],
            members={node_rank: self._latest},
        )
        self.rounds.append(found)


def _add_to_member(member: Member, name: str, event: Event) -> None:
    for field_name, key in _OF_MEMBER.get(name, {}).items():
        setattr(member, field_name, event[key])
    if name == "hang_found":
        member.hang = event
    elif name == "resources":
        for rank, cpu, memory in zip(event["ranks"], event["cpu_s"], event["memory_mib"], strict=False):
            if rank in member.workers:
                member.workers[rank].readings.append(Reading(event["time"], cpu, memory))
    elif name in _OF_WORKER:
        worker = member.workers.setdefault(event["rank"], Worker(event["rank"], event["pid"]))
        for field_name, key in _OF_WORKER[name].items():
            setattr(worker, field_name, event[key])
        if name in ("silence", "worker_exited"):
            worker.silences.append((event["time"], event["silence_s"]))
        elif name == "worker_failed":
            worker.failure = event


def _follow_monotonic_clocks(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events with the wall clock of their launcher's first event, carried on by its monotonic clock.

    A wall clock that is set while the job runs would stretch the rounds of the page by days.
    """
    first: dict[str, Event] = {}
    for event in events:
        began = first.setdefault(event["agent"], event)
        yield {**event, "time": began["time"] + event["monotonic"] - began["monotonic"]}
