"""Reads event logs, and folds them into the history of jobs.

Pure beside `read_lines`: lines go in, records come out. A log may end in the middle of a line, lack any part, and
contain anything: lines that are not events are counted and named, and never raise an error. The events of each
launcher are folded in their order. The parts of one round on several nodes are joined by the round's number and id.
"""

from __future__ import annotations

import json
import math

from elastic_run.records import dataclass
from elastic_run.report.clock_offsets import correct, find_offsets, follow_monotonic_clocks
from elastic_run.report.event_schema import find_mistake
from elastic_run.report.job_history import Agent, Job, Member, Reading, Round, Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import BufferedReader
    from typing import Any

    from elastic_run.report.job_history import Event

#: Bytes that are read of a line at most; no line of an event log is longer.
LINE_LIMIT = 1 << 16


@dataclass(slots=True)
class Mistakes:
    """Lines of a file that are not events.

    Args:
        file: Name of the file.
        count: Number of such lines.
        first_line: Number of the first such line.
        reason: Why that line is no event.
    """

    file: str
    count: int
    first_line: int
    reason: str


# --- reading ---------------------------------------------------------------------------------------------------------
def read_lines(file: BufferedReader, most: float = math.inf) -> Iterator[bytes]:
    """Return the lines of an event log; a line that is longer than any event is cut.

    Args:
        file: The log.
        most: Bytes, counted from the file's position, in which the lines begin.
    """
    while most > 0 and (line := file.readline(LINE_LIMIT + 1)):
        yield line
        most -= len(line)
        while most > 0 and len(line) > LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT + 1)
            most -= len(line)


def read_events(lines: Iterable[bytes], file: str) -> tuple[list[Event], Mistakes | None]:
    """Read the lines of an event log.

    Args:
        lines: The lines of the file.
        file: Name of the file, for messages.

    Returns:
        The events, and the lines that are not events; empty lines don't count.
    """
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


# --- folding ---------------------------------------------------------------------------------------------------------
def fold(events: Iterable[Event]) -> list[Job]:
    """Fold events into jobs; times are corrected where the clocks of nodes differ, or a clock was set.

    Args:
        events: The events of all launchers; those of each launcher in their order. A repeated event counts once.

    Returns:
        The jobs in the order in which they began.
    """
    events = follow_monotonic_clocks(events)
    offsets = find_offsets(events)
    of_agent: dict[str, _AgentFold] = {}
    seen: set[tuple[str, float, str, Any]] = set()
    for event in events:
        key = (event["agent"], event["monotonic"], event["event"], event.get("rank"))
        if key not in seen:
            seen.add(key)
            corrected = correct(event, offsets)
            of_agent.setdefault(event["agent"], _AgentFold(corrected)).take(corrected)
    for name, offset in offsets.items():
        of_agent[name].agent.clock_offset = offset
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

    def take(self, event: Event) -> None:
        """Take the next event."""
        self.agent.last_at = max(self.agent.last_at, event["time"])
        # Of another round: the line that begins it is missing.
        is_of_latest = bool(self.rounds) and event["round"] in (None, self.rounds[-1].number)
        self._member = self._latest if is_of_latest else None
        take = getattr(self, f"_take_{event['event']}", None)
        if take is not None:
            take(event)
        if self._member is not None and event["event"] not in ("rendezvous_started", "agent_ended"):
            self._member.last_at = event["time"]

    def _take_agent_started(self, event: Event) -> None:
        self.agent.started = event

    def _take_agent_ended(self, event: Event) -> None:
        self.agent.ended = event

    def _take_lines_lost(self, event: Event) -> None:
        self.agent.lost_lines += event["lines"]

    def _take_round_formed(self, event: Event) -> None:
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

    def _take_workers_started(self, event: Event) -> None:
        if self._member is not None:
            self._member.started_at, self._member.recovery_s = event["time"], event["recovery_s"]

    def _take_workers_stopping(self, event: Event) -> None:
        if self._member is not None:
            self._member.stopping_at, self._member.stop_reason = event["time"], event["reason"]
            self._member.detail, self._member.detected_s = event["detail"], event["detected_s"]

    def _take_workers_stopped(self, event: Event) -> None:
        if self._member is not None:
            self._member.stopped_at = event["time"]

    def _find_worker(self, event: Event) -> Worker:
        # Without a member the line of the round is missing.
        workers = {} if self._member is None else self._member.workers
        return workers.setdefault(event["rank"], Worker(event["rank"], event["pid"]))

    def _take_worker_started(self, event: Event) -> None:
        worker = self._find_worker(event)
        worker.started_at, worker.is_output_seen = event["time"], event["is_output_seen"]

    def _take_first_output(self, event: Event) -> None:
        self._find_worker(event).first_output_s = event["after_s"]

    def _take_silence(self, event: Event) -> None:
        self._find_worker(event).silences.append((event["time"], event["silence_s"]))

    def _take_resources(self, event: Event) -> None:
        workers = {} if self._member is None else self._member.workers
        for rank, cpu, memory in zip(event["ranks"], event["cpu_s"], event["memory_mib"], strict=False):
            if rank in workers:
                workers[rank].readings.append(Reading(event["time"], cpu, memory))

    def _take_hang_found(self, event: Event) -> None:
        if self._member is not None:
            self._member.hang = event

    def _take_worker_exited(self, event: Event) -> None:
        worker = self._find_worker(event)
        worker.ended_at, worker.was_stopped = event["time"], event["was_stopped"]
        worker.exit_code, worker.signal = event["exit_code"], event["signal"]
        worker.silences.append((event["time"], event["silence_s"]))

    def _take_worker_failed(self, event: Event) -> None:
        self._find_worker(event).failure = event
