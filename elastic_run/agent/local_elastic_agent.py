"""LocalElasticAgent: runs the workers of one node as processes, without ever looking: it is told.

`run` is driven by `agent.supervisor`. Functions as workers are not in this release; commands are.
"""

from __future__ import annotations

import os
import signal
import time

from elastic_run import contract
from elastic_run.agent.api import DEFAULT_ROLE, RunResult
from elastic_run.agent.simple_elastic_agent import SimpleElasticAgent
from elastic_run.agent.state import WorkerState
from elastic_run.agent.supervisor import Supervisor
from elastic_run.agent.surroundings import AgentOptions, Surroundings, parse_signals
from elastic_run.core.policy import RestartPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.agent.api import WorkerGroup, WorkerSpec
    from elastic_run.agent.head_start import HeadStart
    from elastic_run.multiprocessing.errors import ProcessFailure
    from elastic_run.multiprocessing.logs import LogsSpecs
    from elastic_run.report import Ending


class LocalElasticAgent(SimpleElasticAgent):
    """Manages worker processes on this machine.

    Args:
        spec: What the workers are.
        logs_specs: Where their output goes.
        start_method: How function workers are started; commands don't need it.
        exit_barrier_timeout: Seconds to wait at the end for the other nodes.
        log_line_prefix_template: Prefix of tee'd lines.
        shutdown_timeout: Seconds that workers get to stop, on every path.
        health_check_server: Kept for torch's signature.
        around: What torch has no field for, with the group of this spec; by default taken from the spec.

    Raises:
        TypeError: The entrypoint is a function.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = contract.DEFAULT_SHUTDOWN_TIMEOUT,
        health_check_server: Any = None,  # noqa: ANN401 - torch's argument
        *,
        around: Surroundings | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        if not isinstance(spec.entrypoint, str):
            message = (
                "elastic_launch runs commands in this release, not functions: "
                "pass a program as the entrypoint and its arguments to the call"
            )
            raise TypeError(message)
        self._start_method = start_method
        self._health_check_server = health_check_server
        if around is None:
            signals = os.environ.get(contract.ENV_SIGNALS_TO_HANDLE, contract.DEFAULT_SIGNALS_TO_HANDLE)
            options = AgentOptions(
                policy=RestartPolicy(spec.max_restarts),
                shutdown_timeout=shutdown_timeout,
                signals=parse_signals(signals),
                prefix_template=log_line_prefix_template or contract.DEFAULT_PREFIX_TEMPLATE,
            )
            around = Surroundings(self._worker_group, logs_specs, options)
        self._worker_group = around.group
        self._around = around
        self._supervisor: Supervisor | None = None
        self.ending: Ending | None = None
        self._started_at = 0.0

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - torch's signature
        """Run the workers to their end.

        Args:
            role: Name of the role.

        Returns:
            What became of the workers.

        Raises:
            SignalException: The launcher was stopped by a signal; the workers are gone.
            RendezvousError: The nodes could not come together.
            OSError: The workers could not be started.
        """
        with self.supervise() as supervisor:
            ending = supervisor.run()
        self._note_end(ending)
        return self._result(ending)

    def _note_end(self, ending: Ending) -> None:
        self.ending = ending
        self._total_execution_time = int(time.monotonic() - self._started_at)

    def record_ending(self, ending: Ending) -> None:
        """Emit the metrics and events of an ending that is not turned into a result or an exception."""
        self._note_end(ending)
        if self._worker_group.spec.event_log_handler == "null":
            return
        from elastic_run.events import record  # noqa: PLC0415 - only with --event-log-handler
        from elastic_run.multiprocessing.api import SignalException  # noqa: PLC0415
        from elastic_run.rendezvous.api import RendezvousError  # noqa: PLC0415

        try:
            self._result(ending)
            event = self.get_event_succeeded()
        except (SignalException, RendezvousError, OSError):
            event = self.get_event_failed()
        record(event, self._worker_group.spec.event_log_handler)

    def supervise(self, head_start: HeadStart | None = None) -> Supervisor:
        """Make the supervisor of this agent, for the one who wants its console after the run; close it.

        Args:
            head_start: The first round, if its workers were started already.

        Returns:
            The supervisor, not yet running.
        """
        self._started_at = time.monotonic()
        self._supervisor = Supervisor(self._around, head_start, on_state=self._record_state)
        return self._supervisor

    def _record_state(self, state: str, duration_ms: float | None) -> None:
        """Emit torch's event of a state that a round came to."""
        handler = self._worker_group.spec.event_log_handler
        if handler == "null":
            return
        from elastic_run.events import EventSource, record  # noqa: PLC0415 - only with --event-log-handler

        if duration_ms is not None:
            record(self._construct_event(state, EventSource.AGENT, duration_ms=duration_ms), handler)
            return
        for worker in self._worker_group.workers:
            record(self._construct_event(state, EventSource.WORKER, worker), handler)

    def _result(self, ending: Ending) -> RunResult:
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - ending.restarts_used)
        if ending.verdict != "success":
            self._raise_for(ending)
            result = RunResult(WorkerState.FAILED, failures=self._failures(ending))
        else:
            # A command has no return value; torch's map still has an entry for every rank.
            ranks = [worker.global_rank for worker in self._worker_group.workers]
            result = RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._worker_group.state = result.state
        self._record_result(result)
        return result

    def _raise_for(self, ending: Ending) -> None:
        if ending.signal is not None:
            from elastic_run.multiprocessing.api import SignalException  # noqa: PLC0415

            name = signal.Signals(ending.signal)
            message = f"process {os.getpid()} got {name.name}; its workers are stopped"
            raise SignalException(message, name)
        if ending.verdict == "rendezvous":
            from elastic_run.rendezvous.api import RendezvousError  # noqa: PLC0415

            raise RendezvousError(ending.detail)
        if ending.root is None:
            raise OSError(ending.detail or ending.verdict)

    def _failures(self, ending: Ending) -> dict[int, ProcessFailure]:
        from elastic_run.multiprocessing.errors import ProcessFailure  # noqa: PLC0415

        failed = [end for end in ending.ends if end.exitcode != 0 and not end.was_stopped]
        return {end.rank: ProcessFailure(end.local_rank, end.pid, end.exitcode, end.error_file) for end in failed}

    # --- torch's hooks: the supervisor does without them; a subclass that extends one calls them ---------------------
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return {worker.local_rank: worker.id for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(worker_group.state)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        if self._supervisor is not None:
            self._supervisor.request_stop(death_sig)
