"""LocalElasticAgent: runs the workers of one node as processes, and is notified of every exit.

`agent.driver.supervisor` drives `run`. A subclass that replaces a hook of torch's expects that `run` calls its hooks.
For such a subclass `run` is the template's (`SimpleElasticAgent`), and the other hooks start, poll and stop processes
of `start_processes`. Without a listener of events and metrics nothing is built or imported for them.
"""

from __future__ import annotations

import os
import sys
import time

from elastic_run import contract, lazy_names
from elastic_run.agent.api import DEFAULT_ROLE, RunResult
from elastic_run.agent.context import AgentOptions, parse_signals
from elastic_run.agent.driver import AgentParts
from elastic_run.agent.driver.supervisor import Supervisor
from elastic_run.agent.plugin_calls import close_part, is_ours
from elastic_run.agent.results import WorkerState
from elastic_run.agent.simple_elastic_agent import SimpleElasticAgent, measured
from elastic_run.agent.worker_launch import worker_environments
from elastic_run.core.config import JobConfig, NodeConfig
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import WorkerGroup, WorkerSpec
    from elastic_run.agent.driver.timers import TimerServer
    from elastic_run.agent.worker_launch import LaunchedWorkers
    from elastic_run.core.failure.job_result import JobResult
    from elastic_run.multiprocessing.functions.start_processes import PContext
    from elastic_run.multiprocessing.logs import LogsSpecs
    from elastic_run.timer.timer_file import ScopeTimer


TORCHELASTIC_ENABLE_FILE_TIMER = contract.ENV_ENABLE_FILE_TIMER
TORCHELASTIC_HEALTH_CHECK_PORT = contract.ENV_HEALTH_CHECK_PORT
TORCHELASTIC_TIMER_FILE = contract.ENV_TIMER_FILE
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "HealthCheckServer": "elastic_run.agent.health_check_server",
        "LogsSpecs": "elastic_run.multiprocessing",
        "PContext": "elastic_run.multiprocessing",
        "WorkerGroup": "elastic_run.agent.api",
        "WorkerSpec": "elastic_run.agent.api",
        "create_healthcheck_server": "elastic_run.agent.health_check_server",
        "events": "elastic_run.events:",
        "get_logger": "elastic_run.utils",
        "is_uninterruptible_state": "torch.distributed.elastic.utils.process_state",
        "macros": "elastic_run.utils",
        "prof": "elastic_run.metrics",
        "read_proc_state": "torch.distributed.elastic.utils.process_state",
        "safe_substitute": "elastic_run.utils",
        "start_processes": "elastic_run.multiprocessing",
        "timer": "elastic_run.timer:",
    },
    logger="logger",
)


#: The steps of torch's agent that others replace.
_HOOKS = (
    *("_assign_worker_ranks", "_exit_barrier", "_initialize_workers", "_invoke_run", "_monitor_workers"),
    *("_rendezvous", "_restart_workers", "_shutdown", "_start_workers", "_stop_workers"),
)


#: For each step of a round the methods of torch's agents that do the same, in the order in which they end.
_METHODS = {
    "RENDEZVOUS": ("SimpleElasticAgent._rendezvous",),
    "ASSIGN_WORKER_RANKS": ("SimpleElasticAgent._assign_worker_ranks",),
    "START": ("LocalElasticAgent._start_workers", "SimpleElasticAgent._initialize_workers"),
    "STOP": ("LocalElasticAgent._stop_workers",),
}


class LocalElasticAgent(SimpleElasticAgent):
    """Manages worker processes on this machine.

    Args:
        spec: The description of the workers.
        logs_specs: The files for their output.
        start_method: How function workers are started; commands don't need it.
        exit_barrier_timeout: Seconds to wait at the end for the other nodes.
        log_line_prefix_template: Prefix of tee'd lines.
        shutdown_timeout: Seconds that workers get to stop, on every path.
        health_check_server: Kept for torch's signature.
        uninterruptible_state_timeout: Seconds that a worker may be in uninterruptible sleep; None takes the value of
            TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, 0 is no limit.
        context: Settings that torch has no field for, with the group of this spec; None makes them from the spec.

    Attributes:
        connect_stop: Gets a function that stops the job as if a signal had come, from any thread.
    """

    def __init__(  # noqa: PLR0913 - torch's signature
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = contract.DEFAULT_SHUTDOWN_TIMEOUT,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        context: AgentParts | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._health_check_server = health_check_server
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._rdzv_handler = spec.rdzv_handler
        self._pcontext: PContext | None = None
        if context is None:
            if uninterruptible_state_timeout is None:
                uninterruptible_state_timeout = float(os.environ.get(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT) or 0)
            signals = os.environ.get(contract.ENV_SIGNALS_TO_HANDLE, contract.DEFAULT_SIGNALS_TO_HANDLE)
            options = AgentOptions(
                job_config=JobConfig(max_restarts=spec.max_restarts),
                node_config=NodeConfig(exit_barrier_timeout=exit_barrier_timeout),
                shutdown_timeout=min(shutdown_timeout, contract.LONGEST_TIME),
                signals=parse_signals(signals),
                start_method=start_method,
                stuck_timeout=uninterruptible_state_timeout,
                prefix_template=log_line_prefix_template or contract.DEFAULT_PREFIX_TEMPLATE,
            )
            context = AgentParts(self._worker_group, logs_specs, options)
        self._worker_group = context.group
        self._context = context
        self._worker_watchdog: TimerServer | None = None
        self._supervisor: Supervisor | None = None
        self.connect_stop: Callable[[Callable[[int], None]], None] = lambda _: None
        self.job_result: JobResult | None = None
        self._started_at = time.monotonic()
        self._published_state = ""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, and return how they ended.

        Raises:
            SignalException: The launcher was stopped by a signal; the workers are gone.
            RendezvousError: The nodes could not come together.
            OSError: The workers could not be started.
            Exception: The function or an argument can't be sent to a worker; see `functions.Functions`.
        """
        # A subclass, or a program that patches a class, replaces a step, so that the agent has to call it.
        if not all(is_ours(getattr(type(self), name)) for name in _HOOKS):
            return super().run(role)
        spec = self._worker_group.spec
        if spec.entrypoint is not None and not isinstance(spec.entrypoint, str):
            from elastic_run.multiprocessing.functions.launch import Functions

            # A function that its workers can't get is refused before anything is started or joined.
            Functions(spec.entrypoint, {0: spec.args}, self._start_method)
        try:
            with self.supervise() as supervisor:
                self.connect_stop(supervisor.request_stop)
                job_result = supervisor.run()
                self._take_job_result(job_result)
                # Before the supervisor ends: it removes the workers' error files.
                result = self._result(job_result)
                if not result.is_failed() and (last := self._context.current) is not None:
                    result.return_values.update(last.return_values())
        except Exception:
            self._publish_run(is_success=False)
            raise
        self._publish_result(result)
        return result

    def supervise(self, early_start: LaunchedWorkers | None = None) -> Supervisor:
        """Make the supervisor, for a caller that needs its console after the run; the caller closes it."""
        self._started_at = time.monotonic()
        self._context.on_step, self._context.on_timer = self._publish_step, self._log_watchdog_event
        self._supervisor = Supervisor(self._context, early_start)
        self._setup_healthcheck()
        return self._supervisor

    def record_job_result(self, job_result: JobResult) -> None:
        """Emit the metrics and events of a job result that becomes neither a `RunResult` nor an exception."""
        self._take_job_result(job_result)
        if self._worker_group.spec.event_log_handler == "null":
            return
        from elastic_run.multiprocessing.api import SignalException
        from elastic_run.rendezvous.api import RendezvousError

        try:
            self._publish_result(self._result(job_result))
            self.record_event(self.get_event_succeeded)
        except (SignalException, RendezvousError, OSError):
            self._publish_run(is_success=False)
            self.record_event(self.get_event_failed)

    def _take_job_result(self, job_result: JobResult) -> None:
        self._stop_healthcheck()
        self.job_result = job_result
        self._total_execution_time = int(time.monotonic() - self._started_at)

    def _result(self, job_result: JobResult) -> RunResult:
        self._count_remaining(job_result.restarts_used)
        if job_result.verdict != "success":
            from elastic_run.agent.results import describe_failure, raise_unless_worker_failed

            supervisor = self._supervisor
            raise_unless_worker_failed(
                job_result,
                rendezvous_error=None if supervisor is None else supervisor.rendezvous_error,
                start_error=None if supervisor is None else supervisor.rounds.start_error,
            )
            failed = [end for end in job_result.ends if end.exitcode != 0 and not end.was_stopped]
            result = RunResult(WorkerState.FAILED, failures={end.rank: describe_failure(end) for end in failed})
        else:
            # A command has no return value; torch's map still has an entry for every rank.
            ranks = [worker.global_rank for worker in self._worker_group.workers]
            result = RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._worker_group.state = result.state
        return result

    def _count_remaining(self, restarts_used: int) -> None:
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - restarts_used)

    # --- torch's events and metrics -----------------------------------------------------------------------------------
    def _publish_step(self, step: str, duration_ms: float) -> None:
        """Publish a step of a round: one of `_METHODS`, or FAILED."""
        self._count_remaining(self._context.agent.restart_count)
        for name in _METHODS.get(step, ()):
            self._publish_call(name, duration_ms)
        if step == "START":
            for worker in self._worker_group.workers:
                self._record(step, worker)
            if self._published_state:  # a round was before
                self._publish_call("SimpleElasticAgent._restart_workers", duration_ms)
            self._published_state = ""
            self._publish_state("healthy")
        elif step == "FAILED":
            self._publish_state("failed")
        elif step != "STOP":
            self._record(step, duration_ms=duration_ms)

    def _publish_state(self, state: str) -> None:
        """Publish the state of the worker group, once for each state that a round comes to."""
        if state != self._published_state and "elastic_run.metrics" in sys.modules:
            role = self._worker_group.spec.role
            self._publish_call("LocalElasticAgent._monitor_workers", 0.0)
            self.put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
            self.put_metric(f"workers.{role}.{state}", 1)
        self._published_state = state

    def _publish_run(self, *, is_success: bool) -> None:
        milliseconds = (time.monotonic() - self._started_at) * 1000
        self._publish_call("SimpleElasticAgent.run", milliseconds, is_success=is_success)

    def _publish_call(self, name: str, duration_ms: float, *, is_success: bool = True) -> None:
        """Publish a call as `metrics.prof` does."""
        if "elastic_run.metrics" in sys.modules:
            self.put_metric(f"{name}.{'success' if is_success else 'failure'}", 1)
            self.put_metric(f"{name}.duration.ms", int(duration_ms))

    def _publish_result(self, result: RunResult) -> None:
        self._publish_state(result.state.value.lower())
        self._record_metrics(result)
        self._record_worker_events(result)
        self._publish_run(is_success=True)

    def _log_watchdog_event(self, name: str, request: ScopeTimer | None) -> None:
        """Emit torch's event of the workers' timers."""
        if self._worker_group.spec.event_log_handler == "null":
            return
        from elastic_run.agent.driver.timers import watchdog_event
        from elastic_run.events import EventSource

        self.record_event(lambda: watchdog_event(self._construct_event("RUNNING", EventSource.AGENT), name, request))

    # --- torch's hooks, as a subclass that replaces some of them needs the others -------------------------------------
    @measured
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        from elastic_run.multiprocessing.functions.start_processes import start_processes
        from elastic_run.utils import macros, safe_substitute

        spec, options, template = worker_group.spec, self._context.options, self._log_line_prefix_template
        envs = worker_environments(
            worker_group,
            os.environ,
            run_id=spec.rdzv_handler.get_run_id(),
            restart_count=spec.max_restarts - self._remaining_restarts,
            use_agent_store=spec.rdzv_handler.use_agent_store,
            signals=options.signals,
        )
        self._setup_local_watchdog(envs)
        self._setup_healthcheck()
        prefixes = None
        if template is not None:
            prefixes = {
                worker.local_rank: safe_substitute(
                    template,
                    {
                        "role_name": spec.role,
                        "rank": str(worker.global_rank),
                        "local_rank": str(worker.local_rank),
                    },
                )
                for worker in worker_group.workers
            }
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint or "",
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        return self._pcontext.pids()

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Serve the timers of workers that these hooks start, where TORCHELASTIC_ENABLE_FILE_TIMER=1 asks for it."""
        if os.environ.get(contract.ENV_ENABLE_FILE_TIMER) != "1":
            return
        from elastic_run.agent.driver.timers import TimerServer

        self._worker_watchdog = TimerServer(self._list_worker_ranks, self._log_watchdog_event)
        for env in envs.values():
            env[contract.ENV_TIMER_FILE] = self._worker_watchdog.path

    def _list_worker_ranks(self) -> dict[int, int]:
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        pids = {} if self._pcontext is None else self._pcontext.pids()
        return {pid: ranks[rank] for rank, pid in pids.items()}

    def _setup_healthcheck(self) -> None:
        """Start the site's `health_check_server` if TORCHELASTIC_HEALTH_CHECK_PORT is set."""
        port = os.environ.get(contract.ENV_HEALTH_CHECK_PORT, "")
        if not port or self._health_check_server is not None:
            return
        from elastic_run.agent import health_check_server

        self._health_check_server = health_check_server.start(port, lambda: int(time.time()))

    @measured
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._shutdown(timeout=self._shutdown_timeout)

    @measured
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._pcontext is None:
            return RunResult(worker_group.state)
        if {worker.id for worker in worker_group.workers} != set(self._pcontext.pids().values()):
            return RunResult(WorkerState.UNKNOWN)
        found = self._pcontext.wait(0)
        if found is None:
            return RunResult(WorkerState.HEALTHY)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if found.is_failed():
            from elastic_run.agent.results import add_timer

            failures = {ranks[rank]: add_timer(failure) for rank, failure in found.failures.items()}
            return RunResult(WorkerState.FAILED, failures=failures)
        values = {ranks[rank]: value for rank, value in found.return_values.items()}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _shutdown(self, death_sig: signal.Signals = SIGTERM, timeout: int = 30) -> None:  # type: ignore[assignment]  # torch has the enum
        if self._supervisor is not None:
            self._supervisor.request_stop(death_sig)
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            self._worker_watchdog = None
        self._stop_healthcheck()

    def _stop_healthcheck(self) -> None:
        server, self._health_check_server = self._health_check_server, None
        if server is not None:
            close_part(server, "stop", self._post_call)

    def shut_rendezvous(self) -> None:
        """Let the rendezvous go: the job is over on this node."""
        close_part(self._worker_group.spec.rdzv_handler, "shutdown", self._post_call)

    def _post_call(self, name: str, call: Callable[[], object]) -> None:
        if self._supervisor is None:
            super()._post_call(name, call)
        else:
            self._supervisor.plugin_calls.post(name, call)
