"""Makes the events of `report.event_log` for one agent, and hands them to the event log and the metrics.

- Nothing here decides, waits or sets a timer. A failed write does not disturb the job: the writer tells it once.
- Each event is made at a step of the state machine, so the log has the order of the decisions.
- What writes is imported after the first workers were started (law 1). The events before that wait in memory.
"""

from __future__ import annotations

import os
import time

from elastic_run import __version__, contract
from elastic_run.core.agent import machine, messages
from elastic_run.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.worker_readings import Usage
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.core.failure.hang import Stillness
    from elastic_run.core.failure.job_result import JobResult
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.job.documents import Assignment
    from elastic_run.report.event_log import EventFile

    Document: TypeAlias = dict[str, Any]

#: Seconds that the end of a job waits for a disk.
_WAIT_LIMIT = 2.0
#: Characters of an exception, and of a sentence.
_LINE_LIMIT = 2000
#: Silences of a worker in one round that are all written. After these, a silence is written if it is longer than the
#: longest one before by this factor.
_SILENCES = 20
#: Ranks whose shares are written.
_MOST_SHARES = 16
_LONGER = 1.5


class EventRecorder:
    """Makes the events of one agent; without an event log and a metrics port none is kept."""

    def __init__(self, context: AgentContext) -> None:
        self._context, self._loop = context, context.loop
        #: Whether there is an event log.
        self.is_written = not context.has_temporary_logs or bool(context.options.agent_config.events_file)
        self._waiting: list[Document] | None = []
        self._sinks: list[Callable[[Document], None]] = []
        if self.is_written or context.metrics_port is not None:
            self._sinks.append(self._waiting.append)
        self._files: list[EventFile] = []
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

    def begin(self) -> None:
        """Begin to write, when the first workers run, or when it is certain that none will."""
        if self._waiting is None or not self._sinks:
            return
        waiting, self._waiting, self._sinks = self._waiting, None, []
        if self.is_written:
            self._open_files()
        if self._context.metrics_port is not None:
            self._sinks.append(self._context.metrics_port.count)
        if notice := getattr(self._context.logs_specs, "notice", ""):
            self._context.say(notice)
        for document in waiting:
            self._send(document)

    def _open_files(self) -> None:
        from elastic_run.report.event_log import EventFile

        def tell_loss(path: str, error: OSError) -> None:
            text = f"the event log {path} is incomplete: {error.strerror}; this does not affect the job"
            self._loop.call_soon_threadsafe(lambda: self._context.say(text))

        directory = self._context.log_directory
        own = os.path.join(directory, contract.EVENTS_FILE) if directory else ""
        for path in filter(None, (own, self._context.options.agent_config.events_file)):
            try:
                file = EventFile(path, self._describe_gap, tell_loss, is_own=path == own)
            except OSError as error:
                self._context.say(
                    f"the event log {path} can't be written: {error.strerror}; this does not affect the job"
                )
            else:
                self._files.append(file)
        if self._files:
            self._sinks.append(self._write)

    def _write(self, document: Document) -> None:
        line = _encode(document)
        for file in self._files:
            file.write(line)

    def close(self) -> None:
        """Write the events that wait, within a short time."""
        for file in self._files:
            file.close(_WAIT_LIMIT)

    def _describe_gap(self, lines: int) -> bytes:
        """Return the line that says how many lines are missing; may be called in any thread."""
        return _encode(self._document("lines_lost", {"lines": lines}))

    def _document(self, name: str, fields: Document) -> Document:
        return {
            "version": contract.EVENTS_VERSION,
            "event": name,
            "time": round(time.time(), 6),
            "monotonic": round(self._loop.now(), 6),
            "node": self._context.hostname,
            "agent": self._agent_id,
            "run_id": self._context.run_id,
            "round": self._round,
            "restart": self._restart,
            **fields,
        }

    def _put(self, name: str, **fields: Any) -> None:
        if self._sinks:
            self._send(self._document(name, fields))

    def _send(self, document: Document) -> None:
        for sink in self._sinks:
            sink(document)

    # --- the agent -------------------------------------------------------------------------------------------------
    def agent_started(self) -> None:
        """The agent begins."""
        if not self._sinks:
            return
        from elastic_run.agent.script_name import program_name

        spec, config = self._context.group.spec, self._context.options.job_config
        self._began_at = self._loop.now()
        self._put(
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
        self._start_rendezvous()

    def agent_ended(self, result: JobResult) -> None:
        """The agent knows how it ends."""
        if not self._sinks:
            return
        root = result.root if result.verdict != "success" else None
        self._stop_running()
        self._put(
            "agent_ended",
            verdict=result.verdict,
            exit_code=result.exit_code,
            detail=_one_line(result.detail),
            cause="" if root is None else _describe_cause(root),
            cause_rank=None if root is None else root.rank,
            cause_node="" if root is None else root.host,
            wall_s=_seconds(self._loop.now() - self._began_at),
            running_s=_seconds(self._running),
        )

    # --- steps of the machine --------------------------------------------------------------------------------------
    def stepped(
        self,
        event: Event,
        before: machine.Agent,
        after: machine.Agent,
        commands: Sequence[Command],
        job: MultiNodeJob | None,
    ) -> None:
        """The state machine has taken a step; a job of several nodes has a place, and words why it halts the round."""
        if not self._sinks:
            return  # the texts below need imports
        if isinstance(event, messages.Signalled):
            sender = _one_line(self._context.senders.find(event.number))
            self._put("signal_received", signal=signal_name(event.number), sender=sender)
        if isinstance(event, messages.RoundWarned) and after.state == machine.RUNNING:
            self._put("round_warned")
        if before.state == after.state:
            return
        if after.state == machine.RUNNING:
            self._round, self._restart = after.round, after.restart_count
            self._form_round(None if job is None else job.place)
        elif after.state == machine.STOPPING:
            self._begin_stop(after.stop_reason, "" if job is None else job.halt)
        elif after.state == machine.PAUSING:
            pause = sum(command.delay for command in commands if isinstance(command, messages.Pause))
            self._put("pause_started", pause_s=_seconds(pause))
        elif after.state == machine.JOINING:
            self._start_rendezvous()

    def _start_rendezvous(self) -> None:
        self._rendezvous_at = self._loop.now()
        self._put("rendezvous_started")

    def _form_round(self, place: Assignment | None) -> None:
        self._failed_at = None
        self._silences = {}
        group = self._context.group
        nodes = group.group_world_size or 1
        alone = self._agent_id if nodes == 1 else ""
        self._put(
            "round_formed",
            job=alone if place is None else place.incarnation,
            round_id="" if place is None else place.round_id,
            node_rank=group.group_rank or 0,
            nodes=nodes,
            workers=group.workers[0].world_size,
            first_rank=group.workers[0].global_rank,
            reason="" if place is None else _one_line(place.news),
            rendezvous_s=_seconds(self._loop.now() - self._rendezvous_at),
        )

    def _begin_stop(self, reason: str, halt: str) -> None:
        self._stop_running()
        self._stopping_at = now = self._loop.now()
        self._recovers_from = now if self._failed_at is None else self._failed_at
        self._put(
            "workers_stopping",
            reason=reason,
            detail=_one_line(halt) if reason == machine.AFTER_HALT else "",
            detected_s=None if self._failed_at is None else _seconds(now - self._failed_at),
        )

    # --- the workers -----------------------------------------------------------------------------------------------
    def workers_started(self, current: Round) -> None:
        """The workers of a round run, and are watched."""
        for local_rank in sorted(current.workers.pids):
            is_seen = local_rank in current.output.with_stdout
            self._put("worker_started", **self._name(current, local_rank), is_output_seen=is_seen)
        self._started_at = now = self._loop.now()
        recovery, self._recovers_from = self._recovers_from, None
        self._put(
            "workers_started",
            start_s=_seconds(now - current.started),
            recovery_s=None if recovery is None else _seconds(now - recovery),
            kept_state=self._context.kept_label(),
        )

    def output_came(self, current: Round, local_rank: int, silence: float | None) -> None:
        """A worker has written for the first time, or after a silence."""
        name = self._name(current, local_rank)
        if silence is None:
            self._put("first_output", **name, after_s=_seconds(self._loop.now() - current.started))
            return
        told = self._silences.setdefault(local_rank, [])
        if len(told) < _SILENCES or silence >= _LONGER * max(told):
            told.append(silence)
            self._put("silence", **name, silence_s=_seconds(silence))

    def resources_read(self, current: Round, usage: Mapping[int, Usage]) -> None:
        """The processor time and the memory of the workers that run were read."""
        if usage:
            ranks = current.global_ranks
            self._put(
                "resources",
                ranks=[ranks[local_rank] for local_rank in usage],
                cpu_s=[round(used.cpu, 2) for used in usage.values()],
                memory_mib=[used.memory >> 20 for used in usage.values()],
            )

    def hang_found(self, seconds: float, ranks: Mapping[int, Stillness], ended: tuple[int, ...], action: str) -> None:
        """The job hangs, as far as this node knows."""
        from elastic_run.report.stack_lines import find_odd_rank, hang_detail

        detail = _one_line(hang_detail(ranks, ended))
        self._put("hang_found", still_s=_seconds(seconds), rank=find_odd_rank(ranks), detail=detail, action=action)

    def waits_measured(self, shares: Mapping[int, float]) -> None:
        """It was measured for which ranks the others wait; those for which they wait most are written."""
        told = sorted(sorted(shares, key=lambda rank: -shares[rank])[:_MOST_SHARES])
        if told:
            self._put("waits", ranks=told, behind=[round(100 * shares[rank], 1) for rank in told])

    def slow_rank_found(self, rank: int, share: float, line: str) -> None:
        """The other ranks wait for this one again and again."""
        self._put("slow_rank_found", rank=rank, behind=round(100 * share), detail=_one_line(line))

    def worker_exited(self, current: Round, local_rank: int, exitcode: int) -> None:
        """A worker has ended."""
        was_stopped, now = current.was_stopped(local_rank), self._loop.now()
        if exitcode != 0 and not was_stopped and self._failed_at is None:
            self._failed_at = now
        activity = current.output.activities.get(local_rank)
        self._put(
            "worker_exited",
            **self._name(current, local_rank),
            **_end_fields(exitcode, was_stopped=was_stopped),
            uptime_s=_seconds(now - current.started),
            silence_s=_seconds(now - (current.started if activity is None else activity.last)),
        )

    def round_gone(self, ends: Sequence[WorkerEnd], root: WorkerEnd | None, unkillable: int) -> None:
        """No process of the round lives, and all output of the workers was read."""
        if not self._sinks:
            return
        for end in [each for each in ends if each.exitcode != 0 and (each is root or not each.was_stopped)]:
            from elastic_run.core.failure.root_cause import has_lost_rank

            self._put(
                "worker_failed",
                rank=end.rank,
                local_rank=end.local_rank,
                pid=end.pid,
                **_end_fields(end.exitcode, was_stopped=end.was_stopped),
                cause="" if end.exception is None else _describe_cause(end),
                where="" if end.exception is None else _one_line(end.exception.where),
                remark=_one_line(end.remark),
                is_root=end is root,
                is_consequence=has_lost_rank(end),
                log_file=end.log_file,
            )
        self._put("workers_stopped", stop_s=_seconds(self._loop.now() - self._stopping_at), unkillable=unkillable)

    def _name(self, current: Round, local_rank: int) -> Document:
        worker = next(worker for worker in self._context.group.workers if worker.local_rank == local_rank)
        return {"rank": worker.global_rank, "local_rank": local_rank, "pid": current.workers.pids[local_rank]}

    def _stop_running(self) -> None:
        if self._started_at is not None:
            end = self._loop.now() if self._failed_at is None else self._failed_at
            self._running += max(0.0, end - self._started_at)
            self._started_at = None


def _end_fields(exitcode: int, *, was_stopped: bool) -> Document:
    return {
        "exit_code": exitcode if exitcode >= 0 else None,
        "signal": signal_name(-exitcode) if exitcode < 0 else None,
        "was_stopped": was_stopped,
    }


def _describe_cause(end: WorkerEnd) -> str:
    from elastic_run.report.text import end_verb, exception_line

    return _one_line(end_verb(end) if end.exception is None else exception_line(end.exception))


def _one_line(text: str) -> str:
    if not text:
        return ""
    from elastic_run.report.text import elide, printable

    return elide(printable(text), _LINE_LIMIT)


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)


def _encode(document: Document) -> bytes:
    import json

    # ASCII: every reader accepts the line, whatever bytes a worker has put into its message.
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"
