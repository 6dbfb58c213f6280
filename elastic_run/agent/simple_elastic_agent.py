"""SimpleElasticAgent: torch's template of an agent, for subclasses that start workers in their own way.

A subclass implements the four hooks; `run` calls them, and the steps between them that a subclass may replace as well.
The class gets no notification when such workers end, so it polls them every `monitor_interval`. Nothing else in
elastic-run polls. `LocalElasticAgent`, which every launch uses, is notified of each exit.

Source of the hooks and their order: torch 2.13, torch.distributed.elastic.agent.server.api.SimpleElasticAgent.
"""

from __future__ import annotations

import abc
import os
import time

from elastic_run.agent.api import DEFAULT_ROLE, ElasticAgent, RunResult, Worker, WorkerGroup
from elastic_run.agent.plugin_calls import make_call, name_call
from elastic_run.agent.results import WorkerState
from elastic_run.rendezvous.api import RendezvousGracefulExitError, is_kind
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _R = TypeVar("_R")

    from elastic_run.agent.api import WorkerSpec
    from elastic_run.events import Event, EventSource

_BARRIER_KEY = "elastic_run/end/{}"


def measured(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Publish how each call of a step ends and how long it takes, as `metrics.prof`, which is imported by the call."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        from elastic_run.metrics import prof

        return prof(method)(*args, **kwargs)

    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    call.__wrapped__ = method  # type: ignore[attr-defined] # where inspect.signature finds torch's signature
    return call


class SimpleElasticAgent(ElasticAgent):
    """An agent for one worker spec.

    Args:
        spec: The description of the workers.
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
    def _shutdown(self, death_sig: signal.Signals = SIGTERM, timeout: int = 30) -> None:  # type: ignore[assignment]  # torch has the enum
        """Stop the workers and free all resources."""

    @measured
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; return None if the rendezvous dismissed this node, as with torch."""
        from elastic_run.multiprocessing.api import SignalException

        started = time.monotonic()
        is_shut_down = False
        try:
            result = self._invoke_run(role)
        except SignalException as error:
            self._shutdown(error.sigval, timeout=self._shutdown_timeout)
            is_shut_down = True
            raise
        except Exception as error:
            if not is_kind(error, RendezvousGracefulExitError):
                raise
            _log().info("this node has left the job: %s", error)
            return None  # type: ignore[return-value] # torch's
        else:
            self._total_execution_time = int(time.monotonic() - started)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        finally:
            if not is_shut_down:
                self._shutdown(timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - started)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        role = group.spec.role
        self._initialize_workers(group)
        while True:
            # Law 2's one exception: a foreign subclass has no descriptor to wait for.
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            self.put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
            self.put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
            if result.state == WorkerState.SUCCEEDED:
                self._exit_barrier()
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

    @measured
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Take this node's place in a round, and start its workers."""
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            self._record("START", worker)
        worker_group.state = WorkerState.HEALTHY

    @measured
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, and start them in another round."""
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @measured
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the next round; give the group its ranks, its store and the address of the workers' store."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            found = spec.rdzv_handler.next_rendezvous()
        self._store = worker_group.store = found.store
        info = found.bootstrap_store_info
        worker_group.group_rank, worker_group.group_world_size = found.rank, found.world_size
        worker_group.master_addr = spec.master_addr or (info.master_addr if info else None)
        worker_group.master_port = spec.master_port or (info.master_port if info else None)
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(found.store, found.rank, found.world_size, spec)

    @measured
    def _assign_worker_ranks(
        self,
        store: Any,
        group_rank: int,
        group_world_size: int,
        spec: WorkerSpec,
    ) -> list[Worker]:
        """Return this node's workers with their ranks in a round."""
        base_rank, world_size, role_rank, role_size = ask_for_ranks(store, group_rank, group_world_size, spec)
        return [
            Worker(rank, base_rank + rank, role_rank + rank, world_size, role_size)
            for rank in range(spec.local_world_size)
        ]

    def _exit_barrier(self) -> None:
        """Wait until the agents of all nodes have reached this point, or `exit_barrier_timeout` has passed."""
        from datetime import timedelta

        from elastic_run.multiprocessing.api import SignalException

        size = self._worker_group.group_world_size or 1
        if size == 1 or self._store is None:
            return
        try:
            if self._store.add(_BARRIER_KEY.format("count"), 1) == size:
                self._store.set(_BARRIER_KEY.format("all"), "1")
            self._store.wait([_BARRIER_KEY.format("all")], timedelta(seconds=self._exit_barrier_timeout))
        except SignalException:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign store's; our own workers have succeeded
            _log().warning("elastic-run: not all nodes reached the end of the job: %s", error)

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Return a context manager around a step, which emits an event of this state with its duration."""
        from contextlib import contextmanager  # 2 ms, which workers would wait for

        @contextmanager
        def measure() -> Iterator[None]:
            started = time.perf_counter()
            try:
                yield
            finally:
                self._record(state, duration_ms=(time.perf_counter() - started) * 1000)

        return measure()

    def _post_call(self, name: str, call: Callable[[], object]) -> None:
        """Make a call of a plug-in that must not change how the job ends."""
        make_call(name, call)

    def record_event(self, make_event: Callable[[], Event]) -> None:
        """Give an event to the handler that the user chose; to describe it asks the rendezvous, which may raise."""
        from elastic_run.events import get_logging_handler, is_recorded, record

        destination = self._worker_group.spec.event_log_handler
        if is_recorded(destination) and (event := make_call("the description of an event", make_event)) is not None:
            handler = get_logging_handler(destination)
            self._post_call(name_call(handler, "emit"), lambda: record(event, destination))

    def _record(self, state: str, worker: Worker | None = None, **details: Any) -> None:
        """Emit an event of a worker or of the agent; nothing is imported for it where the user chose no handler."""
        if self._worker_group.spec.event_log_handler != "null":
            from elastic_run.events import EventSource

            source = EventSource.AGENT if worker is None else EventSource.WORKER
            self.record_event(lambda: self._construct_event(state, source, worker, **details))

    def put_metric(self, name: str, value: int) -> None:
        """Publish a metric, if there is a handler for it."""
        from elastic_run.metrics import NullMetricHandler, getStream, put_metric

        handler = getStream("torchelastic").handler
        if type(handler) is not NullMetricHandler:
            self._post_call(name_call(handler, "emit"), lambda: put_metric(name, value))

    def get_event_failed(self) -> Event:
        """Return the event of a failed agent, with the exception that is being handled."""
        import traceback

        from elastic_run.events import EventSource

        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """Return the event that says that the agent did its work."""
        from elastic_run.events import EventSource

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
        import json

        from elastic_run.events import Event

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

    def _record_metrics(self, group_results: RunResult) -> None:
        """Emit torch's metrics of a finished run."""
        is_failed = group_results.is_failed()
        has_retried = self._remaining_restarts != self._worker_group.spec.max_restarts
        self._record_flakiness_metric(is_failed)
        self.put_metric(f"workers.{self._worker_group.spec.role}.run_total", 1)
        for name, holds in (
            ("run_success_with_retries", not is_failed and has_retried),
            ("run_success_no_retries", not is_failed and not has_retried),
            ("run_failed_with_retries", is_failed and has_retried),
            ("run_failed_no_retries", is_failed and not has_retried),
        ):
            self._record_metric_with_condition(name, holds)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        self.put_metric(f"workers.{self._worker_group.spec.role}.{metric_name}", int(condition))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        spec = self._worker_group.spec
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        self.put_metric(f"workers.{spec.role}.flakiness", int(flakiness))

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """Return a worker's state for the last events: the group's, or TERMINATED if it was stopped. ValueError."""
        is_failed = worker.global_rank in result.failures
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED) and not is_failed:
            return "TERMINATED"
        if is_failed or worker.global_rank in result.return_values:
            return result.state.value
        message = f"the result has neither a failure nor a value of rank {worker.global_rank}"
        raise ValueError(message)

    def _record_worker_events(self, result: RunResult) -> None:
        """Emit the workers' last events."""
        if self._worker_group.spec.event_log_handler == "null":
            return
        import json

        for worker in self._worker_group.workers:
            failure, state = result.failures.get(worker.global_rank), self._get_worker_state(worker, result)
            details: dict[str, Any] = {}
            if failure is not None:
                error = json.dumps(failure.error_file_data)
                details = {"raw_error": error, "exit_code": failure.exitcode, "worker_pid": failure.pid}
            self._record(state, worker, **details)


def _log() -> Any:
    import logging

    return logging.getLogger(__name__)


def ask_for_ranks(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> tuple[int, int, int, int]:
    """Return the rank of a node's first worker, the number of workers, its rank in its role, and the role's size.

    Our own rendezvous delivers these. With a foreign one the agents write the numbers of their workers into the round's
    store, as torch's do, and the agent of rank 0 computes the ranks for all: O(N).
    """
    size = spec.local_world_size
    if group_world_size == 1:
        return 0, size, 0, size
    import json

    store.set(f"elastic_run/size/{group_rank}", json.dumps([spec.role, size]))
    if group_rank == 0:
        from elastic_run.core.job.ranks import assign_worker_ranks

        answers = [json.loads(store.get(f"elastic_run/size/{rank}")) for rank in range(group_world_size)]
        sizes = [(str(role), int(size)) for role, size in answers]
        world_size = sum(size for _, size in sizes)
        for rank, ranks in enumerate(assign_worker_ranks(sizes)):
            place = [ranks.base_rank, world_size, ranks.role_rank, ranks.role_world_size]
            store.set(f"elastic_run/place/{rank}", json.dumps(place))
    base_rank, world_size, role_rank, role_world_size = map(
        int, json.loads(store.get(f"elastic_run/place/{group_rank}"))
    )
    return base_rank, world_size, role_rank, role_world_size
