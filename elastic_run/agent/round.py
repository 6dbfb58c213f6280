"""One round on this node: its workers with their environment, output and log files, and what became of each.

Rules
- A round is made, started once, stopped once, and read once; the next round is a new object.
- Nothing is decided here. `on_exit` and `on_gone` tell the supervisor, which asks `core.supervision`.
- A worker counts as stopped, not failed, when it ended after it had been told to and in a way that this explains.
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.agent.environment import worker_environment
from elastic_run.multiprocessing.output import WorkerOutput, render_prefix
from elastic_run.multiprocessing.workers import Workers
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.api import Worker
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.core.rootcause import WorkerEnd
    from elastic_run.multiprocessing.logs import LogsDest

#: Signals that nobody sends to stop a process: a worker that ends so has failed, also while it is being stopped.
_CRASHES = frozenset((-4, -5, -6, -7, -8, -11, -31))  # ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS


class Round:
    """The workers of one round.

    Args:
        around: What the rounds of one agent share.
        number: The round's number, from 0.
        restart_count: Restarts so far.
        use_agent_store: Whether the agent serves the workers' store.
        on_exit: Called with (local rank, exit code) for every worker that ends.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        number: int,
        restart_count: int,
        use_agent_store: bool,
        on_exit: Callable[[int, int], None],
    ) -> None:
        self.number = number
        self.restart_count = restart_count
        self.started_at = time.time()
        self._around = around
        self._use_agent_store = use_agent_store
        self._report_exit = on_exit
        self._ends: dict[int, WorkerEnd] = {}
        self._ended_at: dict[int, tuple[float, int, bool]] = {}
        self._started = around.loop.now()
        self._failed_after: float | None = None
        self._logs: LogsDest | None = None
        self.output = WorkerOutput(around.loop, around.console, capture=around.options.capture)
        self.workers = Workers(around.loop, around.guardian, on_exit=self._on_exit)

    def start(self) -> dict[int, int]:
        """Start every worker.

        Returns:
            Pids by local rank.

        Raises:
            OSError: One can't be started; those before it run.
        """
        around = self._around
        group = around.group
        around.make_room()
        envs = {worker.local_rank: self._environment(worker) for worker in group.workers}
        self._logs = around.logs_specs.reify(envs)
        around.announce_log_directory()
        self.output.open_filtered(
            self._logs.filtered_stdout if group.spec.duplicate_stdout_filters else "",
            self._logs.filtered_stderr if group.spec.duplicate_stderr_filters else "",
            stdout_filters=group.spec.duplicate_stdout_filters or (),
            stderr_filters=group.spec.duplicate_stderr_filters or (),
        )
        for worker in group.workers:
            worker.id = self._start_worker(worker, envs[worker.local_rank])
        return dict(self.workers.pids)

    def _environment(self, worker: Worker) -> dict[str, str]:
        around = self._around
        return worker_environment(
            around.group,
            worker,
            os.environ,
            run_id=around.run_id,
            restart_count=self.restart_count,
            max_restarts=around.group.spec.max_restarts,
            use_agent_store=self._use_agent_store,
            signals=around.options.signals,
        )

    def _start_worker(self, worker: Worker, own_env: dict[str, str]) -> int:
        around = self._around
        rank = worker.local_rank
        spec = around.group.spec
        stdout, stderr = self._open_output(worker)
        env = {**os.environ, **own_env, contract.ENV_TOKEN: around.inherited_token}
        argv = [str(spec.entrypoint), *macros.substitute([str(arg) for arg in spec.args], str(rank))]
        try:
            affinity = around.options.affinities.get(rank)
            pid = self.workers.start(rank, argv, env, stdout=stdout, stderr=stderr, affinity=affinity)
            around.limit_worker(pid)
            return pid
        finally:
            self.output.started(rank)

    def _open_output(self, worker: Worker) -> tuple[int, int]:
        logs, rank = self._logs, worker.local_rank
        if logs is None:
            message = "the round's logs are not laid out yet"
            raise RuntimeError(message)
        prefix = render_prefix(
            self._around.options.prefix_template,
            role_name=self._around.group.spec.role,
            local_rank=rank,
            rank=worker.global_rank,
            hostname=self._around.hostname,
            restart_count=self.restart_count,
        )
        return self.output.open(
            rank,
            stdout=logs.stdouts[rank],
            stderr=logs.stderrs[rank],
            tee_stdout=_is_teed(logs.tee_stdouts, rank),
            tee_stderr=_is_teed(logs.tee_stderrs, rank),
            stdout_prefix=prefix,
            stderr_prefix=prefix,
        )

    def _on_exit(self, local_rank: int, exitcode: int) -> None:
        was_stopped = self.workers.was_stopped(local_rank) and exitcode not in _CRASHES
        self._ended_at[local_rank] = (time.time(), exitcode, was_stopped)
        if exitcode != 0 and self._failed_after is None:
            self._failed_after = self._around.loop.now() - self._started
        self._report_exit(local_rank, exitcode)

    @property
    def uptime(self) -> float:
        """Seconds from the round's start to its first failure, or to now."""
        return self._around.loop.now() - self._started if self._failed_after is None else self._failed_after

    def close(self) -> tuple[WorkerEnd, ...]:
        """Read what is left of the workers' output.

        Returns:
            What became of each worker that has ended; empty when all that ended did so with 0.
        """
        for rank in self.workers.pids:
            self.output.finish(rank)
        self.output.close()
        if not any(exitcode for _, exitcode, _ in self._ended_at.values()):
            return ()
        workers = {worker.local_rank: worker for worker in self._around.group.workers}
        return tuple(self._end_of(workers[rank]) for rank in sorted(self._ended_at))

    def _end_of(self, worker: Worker) -> WorkerEnd:
        from elastic_run.core.rootcause import WorkerEnd  # noqa: PLC0415 - only after a failure
        from elastic_run.multiprocessing.errors import find_exception  # noqa: PLC0415 - only after a failure

        rank = worker.local_rank
        ended_at, exitcode, was_stopped = self._ended_at[rank]
        logs = self._logs
        error_file = _file(logs.error_files, rank) if logs is not None else ""
        log_file = _file(logs.stderrs, rank) if logs is not None else ""
        text = self.output.tail(rank).decode(errors="replace") if exitcode else ""
        found = find_exception(error_file, text, exitcode)
        return WorkerEnd(
            rank=worker.global_rank,
            local_rank=rank,
            role=self._around.group.spec.role,
            host=self._around.hostname,
            pid=self.workers.pids[rank],
            exitcode=exitcode,
            ended_at=ended_at,
            uptime=ended_at - self.started_at,
            restart_count=self.restart_count,
            was_stopped=was_stopped,
            exception=found.exception,
            remark=found.problem,
            error_file=error_file,
            stderr_tail=tuple(text.splitlines()[-20:]),
            log_file=log_file,
        )


def _file(paths: dict[int, str], rank: int) -> str:
    """Return a worker's file, or an empty string where there is none."""
    path = paths.get(rank, "")
    return path if path != os.devnull and os.path.lexists(path) else ""


def _is_teed(tees: dict[int, str], rank: int) -> bool:
    return tees.get(rank, os.devnull) not in ("", os.devnull)
