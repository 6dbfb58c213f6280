"""One round on this node: its workers from their start to their end, their output, and how each of them ended.

- The workers of a round are launched, watched, stopped and read once; the next round is a new object.
- A worker counts as stopped, not as failed, if it ended after it was told to stop, in a way that a stop explains. If an
  exception had ended its main thread before that, the worker has failed by this exception, at that moment.
"""

from __future__ import annotations

import os
import sys
import time

from elastic_run import contract
from elastic_run.core.agent.messages import WorkerExited
from elastic_run.multiprocessing.logs import is_log
from elastic_run.multiprocessing.output.worker_output import WorkerOutput
from elastic_run.multiprocessing.workers import Workers
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.api import Worker
    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.worker_launch import LaunchedWorkers
    from elastic_run.core.failure.hang import Uncaught
    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.diagnosis.stack_requests import StackRequests
    from elastic_run.multiprocessing.errors.error_file import ErrorFile

#: The exit code of Python after an uncaught exception.
_UNCAUGHT = 1
#: Signals that are not sent to stop a process: a worker that they end has failed, also while it is being stopped.
_CRASHES = frozenset((-4, -5, -6, -7, -8, -11, -31))  # ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS
_ABORTED = -6
_TRACEBACK = b"Traceback (most recent call last)"
#: An exit code with which an exception counts only if nothing follows it.
_OWN_CODE = 2
_LOST_STATUS = (
    "its exit status is unknown: this program ignores SIGCHLD, or other code of it collects every child (waitpid(-1))"
)


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a worker has ended: the wall clock for display, and seconds since the round's start."""

    at: float
    uptime: float
    exitcode: int
    was_stopped: bool


class Round:
    """The workers of one round; each callback gets a local rank."""

    def __init__(
        self,
        context: AgentContext,
        launched: LaunchedWorkers,
        *,
        number: int,
        on_exit: Callable[[int, int], None],
        on_overdue: Callable[[], None],
        on_output: Callable[[int, float | None], None],
        on_uncaught: Callable[[int], None],
    ) -> None:
        self.number = number
        self.restart_count = context.agent.restart_count
        self.started_at = launched.started_at
        self.started = launched.started
        self.fault_sockets = launched.fault_sockets
        self._context = context
        self._launched = launched
        self._report_exit, self._report_uncaught = on_exit, on_uncaught
        self._loop = context.loop
        self._exits: dict[int, _Exit] = {}
        self._failed_after: float | None = None
        self._stacks: StackRequests | None = None
        #: By local rank: the exception that has ended the main thread, what keeps the process alive since, and a clause
        #: about an exception that was the last output when a signal stopped the job.
        self.uncaught: dict[int, Uncaught] = {}
        self.survivals: dict[int, str] = {}
        self._last_words: dict[int, str] = {}
        self._failed_alive: set[int] = set()
        self.output = WorkerOutput(self._loop, context.console, launched.wiring, on_output=on_output)
        self.workers = Workers(
            self._loop,
            context.guardian,
            on_exit=self._on_exit,
            on_overdue=on_overdue,
            adopts=lambda: context.adopts_orphans,
        )

    def watch(self) -> None:
        """Watch the workers, and take their output. Raises why a worker could not be started; those before it run."""
        launched = self._launched
        for rank, started in launched.workers.items():
            self.workers.adopt(rank, started)
        group = self._context.group
        if launched.logs is not None:
            filters = group.spec.duplicate_stdout_filters, group.spec.duplicate_stderr_filters
            self.output.open_filtered(launched.logs, *filters)
        workers = {worker.local_rank: worker for worker in group.workers}
        ranks = self.global_ranks if self._context.options.agent_config.folds else None
        self.output.attach(lambda rank: self._prefix(workers[rank]), ranks=ranks)
        if launched.error is not None:
            raise launched.error

    def _prefix(self, worker: Worker) -> str:
        from elastic_run.utils import safe_substitute

        values = {
            "local_rank": str(worker.local_rank),
            "rank": str(worker.global_rank),
            "restart_count": str(self.restart_count),
            "hostname": self._context.hostname,
            "role_name": self._context.group.spec.role,
        }
        return safe_substitute(self._context.options.prefix_template, values)

    # --- how workers end -------------------------------------------------------------------------------------------
    def _on_exit(self, local_rank: int, exitcode: int) -> None:
        if self._has_lost_status(local_rank) and self._has_returned(local_rank):
            exitcode = 0
        was_stopped = self.workers.was_stopped(local_rank) and exitcode not in _CRASHES
        uptime = self._loop.now() - self.started
        self._add_exit(local_rank, _Exit(time.time(), uptime, exitcode, was_stopped))
        self._report_exit(local_rank, exitcode)
        self._feed_exit(local_rank, exitcode)

    def _feed_exit(self, local_rank: int, exitcode: int) -> None:
        """Tell the machine that a worker has ended, and whether it seems to have lost a peer."""
        agent = self._context.agent
        # If other workers still run, or other nodes, one of them may have the root cause.
        has_others = agent.follows_job or agent.running != {local_rank}
        is_asked = exitcode != 0 and has_others and self._context.is_running(self.number)
        is_secondary = is_asked and self.is_secondary(local_rank)
        self._context.feed(
            WorkerExited(self.number, local_rank=local_rank, exitcode=exitcode, is_secondary=is_secondary)
        )

    def _add_exit(self, local_rank: int, ended: _Exit) -> None:
        self._exits.setdefault(local_rank, ended)
        if ended.exitcode != 0 and self._failed_after is None:
            self._failed_after = ended.uptime

    def fail_alive(self, local_rank: int) -> None:
        """Let a worker count as failed whose main thread an exception has ended, and whose process lives."""
        self._count_as_failed(local_rank)
        self._feed_exit(local_rank, _UNCAUGHT)

    def _count_as_failed(self, local_rank: int) -> None:
        at, now = self.uncaught[local_rank].at, self._loop.now()
        self._failed_alive.add(local_rank)
        self._exits.pop(local_rank, None)
        self._add_exit(local_rank, _Exit(time.time() - (now - at), at - self.started, _UNCAUGHT, was_stopped=False))

    def _take_uncaught(self, local_rank: int, text: str) -> None:
        from elastic_run.core.failure.hang import read_uncaught

        told = read_uncaught(text)
        if told is not None and local_rank not in self.uncaught:
            self.uncaught[local_rank] = told
            if self._context.is_running(self.number):  # else it is being stopped: the worker's end tells all
                self._report_uncaught(local_rank)

    def _has_lost_status(self, local_rank: int) -> bool:
        return self.workers.pids[local_rank] in self._loop.lost_exits

    def _has_returned(self, local_rank: int) -> bool:
        """Whether a worker's function has returned, which its value tells; False for a command."""
        function = self._launched.workers[local_rank].function
        if function is None:
            return False
        function.finish()
        return function.has_returned

    def was_stopped(self, local_rank: int) -> bool:
        """Whether a worker that has ended did so since it was told to stop."""
        return self._exits[local_rank].was_stopped

    # --- what the workers do ---------------------------------------------------------------------------------------
    def find_silences(self) -> dict[int, float]:
        """Return seconds since the last output of each worker that runs, by global rank."""
        now, activities, ranks = self._loop.now(), self.output.activities, self.global_ranks
        return {ranks[rank]: now - activities[rank].last for rank in self.workers.alive if rank in activities}

    def exit_code(self, local_rank: int) -> int | None:
        """Return a worker's exit code, or minus the signal's number; None while it runs."""
        ended = self._exits.get(local_rank)
        return None if ended is None else ended.exitcode

    def output_files(self, local_rank: int) -> list[str]:
        """Return the log files that a worker writes itself, with no pipe between."""
        logs = self._launched.logs
        if logs is None:
            return []
        streams = ((logs.stdouts, logs.tee_stdouts), (logs.stderrs, logs.tee_stderrs))
        own = [_file(files, local_rank) for files, tees in streams if not _file(tees, local_rank)]
        return [path for path in own if path]

    def sees_stdout(self, local_rank: int) -> bool:
        """Whether this process can read a worker's stdout: it passes through here, or goes into a log file."""
        logs = self._launched.logs
        return local_rank in self.output.with_stdout or (logs is not None and bool(_file(logs.stdouts, local_rank)))

    def is_secondary(self, local_rank: int) -> bool:
        """Whether a worker that has just failed seems to have lost a peer."""
        exitcode = self._exits[local_rank].exitcode
        if exitcode < 0 and exitcode != _ABORTED:
            return False  # lost peers make collectives raise, or abort
        from elastic_run.core.failure.root_cause import has_lost_rank

        self.output.catch_up(local_rank)
        # The siblings wait: a large log file is searched at the end of the round.
        return has_lost_rank(self._make_end(local_rank, is_thorough=False))

    def find_last_words(self, local_rank: int) -> ExceptionText | None:
        """Return the exception that is the last output of a worker on stderr, or None."""
        from elastic_run.core.failure.traceback_text import parse_exception

        said = self.output.tail(local_rank, is_thorough=False)
        return parse_exception(said.decode(errors="replace"), exitcode=_OWN_CODE) if _TRACEBACK in said else None

    def keep_last_words(self) -> None:
        """Keep, before a stop, the exceptions that are the last output of workers which can't tell of them."""
        from elastic_run.report import lines

        for rank in self.workers.alive - self.uncaught.keys():
            written, activity = self.find_last_words(rank), self.output.activities.get(rank)
            if written and not self.listen_for_stacks().has_handler(rank, self.workers.pids[rank]):
                seconds = None if activity is None else self._loop.now() - activity.last
                self._last_words[rank] = lines.last_words(written, seconds)

    def listen_for_stacks(self) -> StackRequests:
        """Read the pipes for the workers' stacks from now on; no worker waits for the import then."""
        if self._stacks is None:
            from elastic_run.diagnosis.stack_requests import StackRequests

            pipes, self._launched.wiring.stacks = self._launched.wiring.stacks, {}
            self._stacks = StackRequests(self._loop, pipes, self._take_uncaught)
        return self._stacks

    def ask_stacks(self, wait_limit: float, on_done: Callable[[dict[int, Dump]], None]) -> None:
        """Ask the workers that run for their stacks; `on_done` takes them by global rank."""
        ranks = self.global_ranks
        self.listen_for_stacks().ask(
            self.alive_pids, wait_limit, lambda found: on_done({ranks[local]: dump for local, dump in found.items()})
        )

    def write_stacks(self, dumps: Mapping[int, Dump]) -> str:
        """Write all stacks into a file of the log directory; return its path, or "" where there is none."""
        from elastic_run.diagnosis.stack_requests import write_stacks

        directory = self._context.log_directory
        try:
            return write_stacks(directory, dumps) if directory else ""
        except OSError as error:
            self._context.say(f"{contract.STACKS_FILE} could not be written to {directory}: {error.strerror}")
            return ""

    @property
    def alive_pids(self) -> dict[int, int]:
        """Pids of the workers that run, by local rank."""
        return {rank: self.workers.pids[rank] for rank in self.workers.alive}

    @property
    def global_ranks(self) -> dict[int, int]:
        """Global ranks by local rank."""
        return {worker.local_rank: worker.global_rank for worker in self._context.group.workers}

    @property
    def uptime(self) -> float:
        """Seconds from the round's start to its first failure, or to now."""
        return self._loop.now() - self.started if self._failed_after is None else self._failed_after

    # --- the end ---------------------------------------------------------------------------------------------------
    def close(self) -> tuple[WorkerEnd, ...]:
        """Read the rest of the output; return how each worker has ended, and nothing if all have exit code 0."""
        for rank in self.workers.pids:
            self.output.finish(rank)
        self.output.close()
        if self._stacks is not None:
            self._stacks.close()
        self._launched.wiring.close_stacks()
        for started in self._launched.workers.values():
            if started.function is not None:
                started.function.finish()
        if self._launched.functions is not None:
            self._launched.functions.close()
        for rank, told in self.uncaught.items():
            if self.workers.was_stopped(rank) and told.at < (self.workers.stopped_at or 0.0):
                self._count_as_failed(rank)
        if not any(ended.exitcode for ended in self._exits.values()):
            return ()
        return tuple(_with_timer(self._make_end(rank)) for rank in sorted(self._exits))

    def return_values(self) -> dict[int, Any]:
        """Return the values of the workers' functions by global rank, after `close`; may raise UnpicklingError."""
        ranks = self.global_ranks
        return {
            ranks[local]: started.function.read_value(ranks[local])
            for local, started in sorted(self._launched.workers.items())
            if started.function is not None
        }

    def _make_end(self, rank: int, *, is_thorough: bool = True) -> WorkerEnd:
        from elastic_run.core.failure.root_cause import STDERR_TAIL_LINES, WorkerEnd
        from elastic_run.multiprocessing.errors.error_file import find_exception

        ended = self._exits[rank]
        logs = self._launched.logs
        error_file = _file(logs.error_files, rank) if logs is not None else ""
        log_file = _file(logs.stderrs, rank) or _file(getattr(logs, "kept_stderrs", {}), rank) if logs else ""
        text = self.output.tail(rank, is_thorough=is_thorough).decode(errors="replace") if ended.exitcode else ""
        found = find_exception(error_file, text, ended.exitcode, was_stopped=ended.was_stopped)
        if rank in self._failed_alive:
            found = self._explain_failure(rank, found)
        return WorkerEnd(
            rank=self.global_ranks[rank],
            local_rank=rank,
            role=self._context.group.spec.role,
            host=self._context.hostname,
            pid=self.workers.pids[rank],
            exitcode=ended.exitcode,
            ended_at=ended.at,
            uptime=ended.uptime,
            restart_count=self.restart_count,
            was_stopped=ended.was_stopped,
            exception=found.exception,
            remark=_LOST_STATUS if self._has_lost_status(rank) else found.problem,
            error_file=error_file,
            stderr_tail=tuple(text.splitlines()[-STDERR_TAIL_LINES:]),
            stderr_target=self.output.uncaptured_target(rank),
            log_file=log_file,
            last_words=self._last_words.get(rank, "") if ended.was_stopped else "",
        )

    def _explain_failure(self, rank: int, found: ErrorFile) -> ErrorFile:
        """Complete the exception of a worker that has failed and lived on, and say for how long."""
        from elastic_run.core.failure.hang import confirm, describe_survival
        from elastic_run.report.lines import lived_on

        told, stopped_at = self.uncaught[rank], self.workers.stopped_at
        seconds = (self._loop.now() if stopped_at is None else stopped_at) - told.at
        found.exception = confirm(found.exception, told)
        found.problem = found.problem or lived_on(seconds, self.survivals.get(rank) or describe_survival(told))
        return found


def _with_timer(end: WorkerEnd) -> WorkerEnd:
    """Add the timer that ended the worker, if one did; it can be asked for once."""
    if end.exitcode and "elastic_run.timer.timer_file" in sys.modules:
        from elastic_run.core.failure.root_cause import ExceptionText
        from elastic_run.timer.timer_file import pop_expiry

        said = end.exception or ExceptionText("")
        if text := pop_expiry(end.pid):
            end.exception = ExceptionText(contract.TIMER_EXPIRED, text, said.lines, said.where)
    return end


def _file(paths: dict[int, str], rank: int) -> str:
    """Return a worker's file, or an empty string where there is none."""
    path = paths.get(rank, "")
    return path if is_log(path) and os.path.lexists(path) else ""
