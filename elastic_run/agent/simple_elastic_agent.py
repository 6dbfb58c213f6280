"""SimpleElasticAgent: torch's template of an agent, for subclasses that start workers in a way of their own.

A subclass implements the four hooks; `run` calls them. Nothing tells us when such workers end, so this class looks at
them every `monitor_interval`: the only place where elastic-run polls. `LocalElasticAgent`, which every launch uses,
does not: its workers are processes, and it waits for them.

Source of the hooks and their order: torch 2.13, torch.distributed.elastic.agent.server.api.SimpleElasticAgent.
"""

from __future__ import annotations

import abc
import os
import signal
import time

from elastic_run.agent.api import DEFAULT_ROLE, ElasticAgent, RunResult, WorkerGroup
from elastic_run.agent.places import agree_on_ranks
from elastic_run.agent.state import WorkerState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.agent.api import Worker, WorkerSpec
    from elastic_run.events import Event, EventSource


class SimpleElasticAgent(ElasticAgent):
    """An agent for one worker spec.

    Args:
        spec: What the workers are.
        exit_barrier_timeout: Seconds to wait at the end for the other nodes.
        shutdown_timeout: Seconds that workers get to stop.
    """

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 - torch's signature
        """Return the group; there is one, whatever the role."""
        return self._worker_group

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the group's workers; return their ids by local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the group's workers, in whatever state they are."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers; return the group's state now."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop what runs and give back what was taken."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; see `ElasticAgent.run`."""
        from elastic_run.multiprocessing.api import SignalException  # noqa: PLC0415

        started = time.monotonic()
        is_shut_down = False
        try:
            result = self._invoke_run(role)
        except SignalException as error:
            self._shutdown(error.sigval, timeout=self._shutdown_timeout)
            is_shut_down = True
            raise
        else:
            self._total_execution_time = int(time.monotonic() - started)
            self._record_result(result)
            return result
        finally:
            if not is_shut_down:
                self._shutdown(timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - started)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            # Law 2's one exception: a foreign subclass has no descriptor to wait for.
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                return result
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                if self._remaining_restarts == 0:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return result
                self._remaining_restarts -= 1
                self._restart_workers(group)
            elif result.state != WorkerState.HEALTHY:
                message = f"worker group {role!r} is in state {result.state.value}"
                raise RuntimeError(message)
            elif group.spec.rdzv_handler.num_nodes_waiting() > 0:
                self._restart_workers(group)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker_group.workers[local_rank].id = worker_id
        worker_group.state = WorkerState.HEALTHY

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        found = spec.rdzv_handler.next_rendezvous()
        self._store = worker_group.store = found.store
        info = found.bootstrap_store_info
        worker_group.master_addr = spec.master_addr or (info.master_addr if info else None)
        worker_group.master_port = spec.master_port or (info.master_port if info else None)
        agree_on_ranks(worker_group, found)

    def get_event_failed(self) -> Event:
        """Return the event that says that the agent failed, with the exception that is being handled."""
        import traceback  # noqa: PLC0415

        from elastic_run.events import EventSource  # noqa: PLC0415

        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """Return the event that says that the agent did its work."""
        from elastic_run.events import EventSource  # noqa: PLC0415

        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        import json  # noqa: PLC0415 - events are rare

        from elastic_run.events import Event  # noqa: PLC0415

        group, spec = self._worker_group, self._worker_group.spec
        details: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            details |= {
                "local_rank": (worker.local_rank,),
                "role_rank": (worker.role_rank,),
                "role_world_size": (worker.role_world_size,),
                "exit_code": (exit_code,),
                "worker_pid": (worker_pid,),
            }
        metadata = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker is not None else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker is not None else None,
            "role": spec.role,
            "hostname": os.uname().nodename,
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(details),
            "agent_restarts": spec.max_restarts - self._remaining_restarts,
            "duration_ms": duration_ms,
        }
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    def _record_result(self, result: RunResult) -> None:
        """Emit torch's metrics of a finished run, and the workers' last events."""
        from elastic_run.metrics import put_metric  # noqa: PLC0415

        spec = self._worker_group.spec
        is_failed = result.is_failed()
        has_retried = self._remaining_restarts != spec.max_restarts
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        put_metric(f"workers.{spec.role}.flakiness", int(flakiness))
        put_metric(f"workers.{spec.role}.run_total", 1)
        for name, holds in (
            ("run_success_with_retries", not is_failed and has_retried),
            ("run_success_no_retries", not is_failed and not has_retried),
            ("run_failed_with_retries", is_failed and has_retried),
            ("run_failed_no_retries", is_failed and not has_retried),
        ):
            put_metric(f"workers.{spec.role}.{name}", int(holds))
        if spec.event_log_handler != "null":
            self._record_worker_events(result)

    def _record_worker_events(self, result: RunResult) -> None:
        import json  # noqa: PLC0415

        from elastic_run.events import EventSource, record  # noqa: PLC0415

        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            is_terminated = result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED) and failure is None
            event = self._construct_event(
                "TERMINATED" if is_terminated else result.state.value,
                EventSource.WORKER,
                worker,
                raw_error=json.dumps(failure.error_file_data) if failure is not None else None,
                exit_code=failure.exitcode if failure is not None else None,
                worker_pid=failure.pid if failure is not None else None,
            )
            record(event, self._worker_group.spec.event_log_handler)
