"""Makes the events of `report.event_log` for one agent, and hands them to the event log and the metrics.

Rules
- Nothing here decides, waits or sets a timer. A failed write does not disturb the job: the writer tells it once.
- Each event is made at a step of the state machine, so the log has the order of the decisions.
"""

from __future__ import annotations

import json
import os

from elastic_run import __version__, contract
from elastic_run.agent.script_name import program_name
from elastic_run.core.agent import machine, messages
from elastic_run.core.failure.root_cause import has_lost_rank
from elastic_run.report.event_log import VERSION, EventFile, EventWriter
from elastic_run.report.text import elide, end_verb, exception_line, printable, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.worker_readings import Usage
    from elastic_run.core.agent.messages import Command
    from elastic_run.core.failure.hang import Stillness
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.job.documents import Assignment
    from elastic_run.loop import Loop
    from elastic_run.report import JobResult

    Document: TypeAlias = dict[str, Any]
    #: Wall clock and monotonic clock, in seconds.
    Moment: TypeAlias = tuple[float, float]

#: Seconds that the end of a job waits for a disk.
_WAIT_LIMIT = 2.0
#: Characters of an exception, and of a sentence.
_LINE_LIMIT = 2000
#: Silences of a worker in one round that are all written. After these, a silence is written if it is longer than the
#: longest one before by this factor.
_SILENCES = 20
_LONGER = 1.5


def open_recorder(context: AgentContext, loop: Loop, say: Callable[[str], None]) -> EventRecorder | None:
    """Open the event log in the log directory, which exists by now; None if there is no log and no metrics port."""

    def tell_loss(path: str, error: OSError) -> None:
        text = f"the event log {path} is incomplete: {error.strerror}; this does not affect the job"
        loop.call_soon_threadsafe(lambda: say(text))

    recorder = EventRecorder(context)
    directory = context.log_directory
    own = os.path.join(directory, contract.EVENTS_FILE) if directory else ""
    files = []
    for path in filter(None, (own, context.options.agent_config.events_file)):
        try:
            files.append(EventFile(path, recorder.describe_gap, tell_loss, is_own=path == own))
        except OSError as error:
            say(f"the event log {path} can't be written: {error.strerror}; this does not affect the job")
    if files:
        recorder.write_to(EventWriter(files))
    if context.metrics_port is not None:
        recorder.sinks.append(context.metrics_port.count)
    return recorder if recorder.sinks else None


class EventRecorder:
    """Makes the events of one agent; each of `sinks` gets them."""

    def __init__(self, context: AgentContext) -> None:
        self.sinks: list[Callable[[Document], None]] = []
        self._context = context
        self._writer: EventWriter | None = None
        self._agent_id = os.urandom(4).hex()
        self._round: int | None = None
        self._restart = 0
        self._began_at = 0.0
        self._rendezvous_at = 0.0
        self._started_at: float | None = None
        self._failed_at: float | None = None
        self._recovers_from: float | None = None
        self._stopping_at = 0.0
        self._running = 0.0
        self._silences: dict[int, list[float]] = {}

    def write_to(self, writer: EventWriter) -> None:
        """Write each event as a line of JSON."""
        self._writer = writer
        self.sinks.append(lambda document: writer.write(_encode(document)))

    def describe_gap(self, lines: int) -> bytes:
        """Return the line that says how many lines are missing; may be called in any thread."""
        import time

        return _encode(self._document((time.time(), time.monotonic()), "lines_lost", {"lines": lines}))

    def close(self) -> None:
        """Write the events that wait, within a short time."""
        if self._writer is not None:
            self._writer.close(_WAIT_LIMIT)

    def _document(self, moment: Moment, name: str, fields: Document) -> Document:
        return {
            "version": VERSION,
            "event": name,
            "time": round(moment[0], 6),
            "monotonic": round(moment[1], 6),
            "node": self._context.hostname,
            "agent": self._agent_id,
            "run_id": self._context.run_id,
            "round": self._round,
            "restart": self._restart,
            **fields,
        }

    def _put(self, moment: Moment, name: str, **fields: Any) -> None:
        document = self._document(moment, name, fields)
        for sink in self.sinks:
            sink(document)

    # --- the agent -------------------------------------------------------------------------------------------------
    def agent_started(self, moment: Moment) -> None:
        """The agent begins."""
        spec, config = self._context.group.spec, self._context.options.job_config
        self._began_at = moment[1]
        self._put(
            moment,
            "agent_started",
            agent_pid=os.getpid(),
            release=__version__,
            program=program_name(spec.entrypoint, spec.args),
            role=spec.role,
            local_workers=spec.local_world_size,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            max_restarts=config.max_restarts,
        )
        self._start_rendezvous(moment)

    def agent_ended(self, moment: Moment, result: JobResult) -> None:
        """The agent knows how it ends."""
        root = result.root if result.verdict != "success" else None
        self._stop_running(moment[1])
        self._put(
            moment,
            "agent_ended",
            verdict=result.verdict,
            exit_code=result.exit_code,
            detail=_one_line(result.detail),
            cause="" if root is None else _describe_root(root),
            cause_rank=None if root is None else root.rank,
            cause_node="" if root is None else root.host,
            wall_s=_seconds(moment[1] - self._began_at),
            running_s=_seconds(self._running),
        )

    # --- steps of the machine --------------------------------------------------------------------------------------
    def signal_received(self, moment: Moment, number: int, sender: str) -> None:
        """The launcher has got a signal."""
        self._put(moment, "signal_received", signal=signal_name(number), sender=_one_line(sender))

    def round_warned(self, moment: Moment) -> None:
        """The workers get a warning: new nodes wait to join."""
        self._put(moment, "round_warned")

    def stepped(
        self,
        moment: Moment,
        before: machine.Agent,
        after: machine.Agent,
        commands: Sequence[Command],
        place: Assignment | None = None,
        halt: str = "",
    ) -> None:
        """The state machine has taken a step; a job of several nodes has a place, and words why it halts the round."""
        if before.state == after.state:
            return
        if after.state == machine.RUNNING:
            self._round, self._restart = after.round, after.restart_count
            self._form_round(moment, place)
        elif after.state == machine.STOPPING:
            self._begin_stop(moment, after.stop_reason, halt)
        elif after.state == machine.PAUSING:
            pause = sum(command.delay for command in commands if isinstance(command, messages.Pause))
            self._put(moment, "pause_started", pause_s=_seconds(pause))
        elif after.state == machine.JOINING:
            self._start_rendezvous(moment)

    def _start_rendezvous(self, moment: Moment) -> None:
        self._rendezvous_at = moment[1]
        self._put(moment, "rendezvous_started")

    def _form_round(self, moment: Moment, place: Assignment | None) -> None:
        self._failed_at = None
        self._silences = {}
        group = self._context.group
        nodes = group.group_world_size or 1
        alone = self._agent_id if nodes == 1 else ""
        self._put(
            moment,
            "round_formed",
            job=alone if place is None else place.incarnation,
            round_id="" if place is None else place.round_id,
            node_rank=group.group_rank or 0,
            nodes=nodes,
            workers=group.workers[0].world_size,
            first_rank=group.workers[0].global_rank,
            reason="" if place is None else _one_line(place.news),
            rendezvous_s=_seconds(moment[1] - self._rendezvous_at),
        )

    def _begin_stop(self, moment: Moment, reason: str, halt: str) -> None:
        self._stop_running(moment[1])
        self._stopping_at = moment[1]
        self._recovers_from = moment[1] if self._failed_at is None else self._failed_at
        self._put(
            moment,
            "workers_stopping",
            reason=reason,
            detail=_one_line(halt) if reason == machine.AFTER_HALT else "",
            detected_s=None if self._failed_at is None else _seconds(moment[1] - self._failed_at),
        )

    # --- the workers -----------------------------------------------------------------------------------------------
    def workers_started(self, moment: Moment, current: Round) -> None:
        """The workers of a round run, and are watched."""
        for local_rank in sorted(current.workers.pids):
            is_seen = local_rank in current.output.with_stdout
            self._put(moment, "worker_started", **self._name(current, local_rank), is_output_seen=is_seen)
        self._started_at = moment[1]
        recovery, self._recovers_from = self._recovers_from, None
        self._put(
            moment,
            "workers_started",
            start_s=_seconds(moment[1] - current.started),
            recovery_s=None if recovery is None else _seconds(moment[1] - recovery),
        )

    def output_came(self, moment: Moment, current: Round, local_rank: int, silence: float | None) -> None:
        """A worker has written for the first time, or after a silence."""
        who = self._name(current, local_rank)
        if silence is None:
            self._put(moment, "first_output", **who, after_s=_seconds(moment[1] - current.started))
            return
        told = self._silences.setdefault(local_rank, [])
        if len(told) < _SILENCES or silence >= _LONGER * max(told):
            told.append(silence)
            self._put(moment, "silence", **who, silence_s=_seconds(silence))

    def resources_read(self, moment: Moment, current: Round, usage: Mapping[int, Usage]) -> None:
        """The processor time and the memory of the workers that run were read."""
        if usage:
            ranks = current.global_ranks
            self._put(
                moment,
                "resources",
                ranks=[ranks[local_rank] for local_rank in usage],
                cpu_s=[round(used.cpu, 2) for used in usage.values()],
                memory_mib=[used.memory >> 20 for used in usage.values()],
            )

    def hang_found(
        self, moment: Moment, seconds: float, ranks: Mapping[int, Stillness], ended: tuple[int, ...], action: str
    ) -> None:
        """The job hangs, as far as this node knows."""
        from elastic_run.report.stack_lines import find_odd_rank, hang_detail

        self._put(
            moment,
            "hang_found",
            still_s=_seconds(seconds),
            rank=find_odd_rank(ranks),
            detail=_one_line(hang_detail(ranks, ended)),
            action=action,
        )

    def worker_exited(self, moment: Moment, current: Round, local_rank: int, exitcode: int) -> None:
        """A worker has ended."""
        was_stopped = current.was_stopped(local_rank)
        if exitcode != 0 and not was_stopped and self._failed_at is None:
            self._failed_at = moment[1]
        activity = current.output.activities.get(local_rank)
        self._put(
            moment,
            "worker_exited",
            **self._name(current, local_rank),
            **_end_fields(exitcode, was_stopped=was_stopped),
            uptime_s=_seconds(moment[1] - current.started),
            silence_s=_seconds(moment[1] - (current.started if activity is None else activity.last)),
        )

    def round_gone(self, moment: Moment, ends: Sequence[WorkerEnd], root: WorkerEnd | None, unkillable: int) -> None:
        """No process of the round lives, and all output of the workers was read."""
        for end in ends:
            if end.exitcode != 0 and (end is root or not end.was_stopped):
                self._put_failure(moment, end, is_root=end is root)
        stop = moment[1] - self._stopping_at
        self._put(moment, "workers_stopped", stop_s=_seconds(stop), unkillable=unkillable)

    def _put_failure(self, moment: Moment, end: WorkerEnd, *, is_root: bool) -> None:
        exception = end.exception
        self._put(
            moment,
            "worker_failed",
            rank=end.rank,
            local_rank=end.local_rank,
            pid=end.pid,
            **_end_fields(end.exitcode, was_stopped=end.was_stopped),
            cause="" if exception is None else _one_line(exception_line(exception)),
            where="" if exception is None else _one_line(exception.where),
            remark=_one_line(end.remark),
            is_root=is_root,
            is_consequence=has_lost_rank(end),
            log_file=end.log_file,
        )

    def _name(self, current: Round, local_rank: int) -> Document:
        worker = next(worker for worker in self._context.group.workers if worker.local_rank == local_rank)
        return {"rank": worker.global_rank, "local_rank": local_rank, "pid": current.workers.pids[local_rank]}

    def _stop_running(self, now: float) -> None:
        if self._started_at is not None:
            end = now if self._failed_at is None else self._failed_at
            self._running += max(0.0, end - self._started_at)
            self._started_at = None


def _end_fields(exitcode: int, *, was_stopped: bool) -> Document:
    return {
        "exit_code": exitcode if exitcode >= 0 else None,
        "signal": signal_name(-exitcode) if exitcode < 0 else None,
        "was_stopped": was_stopped,
    }


def _describe_root(root: WorkerEnd) -> str:
    return _one_line(end_verb(root) if root.exception is None else exception_line(root.exception))


def _one_line(text: str) -> str:
    return elide(printable(text), _LINE_LIMIT) if text else ""


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)


def _encode(document: Document) -> bytes:
    # ASCII: every reader accepts the line, whatever bytes a worker has put into its message.
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"
