"""Typical programs that use elastic-run, for mypy and pyright: never run, only checked.

`assert_type` says what a user's editor should show. A line that must be an error has an ignore with the checker's code;
both checkers are told to complain about an ignore that isn't needed.
"""

from __future__ import annotations

import logging
import sys
from signal import SIGABRT, Signals
from typing import TYPE_CHECKING, Any

from typing_extensions import assert_type

import elastic_run
from elastic_run import compat, events, metrics, timer
from elastic_run.agent import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from elastic_run.launcher import LaunchConfig, elastic_launch, launch_agent
from elastic_run.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    start_processes,
)
from elastic_run.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure, get_error_handler, record
from elastic_run.rendezvous import (
    EtcdServer,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    get_rendezvous_handler,
    parse_rendezvous_endpoint,
    rendezvous_handler_registry,
)
from elastic_run.utils import get_free_port, macros
from elastic_run.utils.data import CyclingIterator

if TYPE_CHECKING:
    from collections.abc import Iterator


def train(rate: float, steps: int = 3) -> float:
    """Stand for a training function."""
    return rate * steps


def launch_a_function() -> float:
    """Launch, look at return values and at failures."""
    config = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=4, run_id="job", logs_specs=DefaultLogsSpecs())
    assert_type(config.nproc_per_node, int)
    assert_type(config.rdzv_configs, dict[str, Any])
    LaunchConfig(1, 1, nproc_per_node="four")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    LaunchConfig(1, 1)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    try:
        values = elastic_launch(config, train)(0.1)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        assert_type(rank, int)
        assert_type(failure, ProcessFailure)
        assert_type(failure.exitcode, int)
        raise
    except SignalException as error:
        assert_type(error.sigval, Signals)
        raise
    assert_type(values, dict[int, Any])
    assert_type(launch_agent(config, "train.py", ["--rate", "0.1"]), dict[int, Any])
    elastic_run.spawn(train, args=(0.1,), nprocs=2)
    return float(values[0])


@record
def main(path: str) -> int:
    """Stand for a worker's main function."""
    return len(path)


def use_errors() -> None:
    """What @record and its handler give."""
    assert_type(main("train.py"), int | None)
    main(7)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    handler = get_error_handler()
    assert_type(handler, ErrorHandler)
    handler.record_exception(ValueError("bad batch"))
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=-9, error_file="error.json")
    assert_type(failure.signal_name(), str)
    assert_type(elastic_run.ChildFailedError("train.py", {0: failure}).format_msg(), str)


class QuietAgent(SimpleElasticAgent):
    """An agent of a user's own."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert_type(worker_group.spec, WorkerSpec)
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        worker_group.state = WorkerState.STOPPED

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(state=worker_group.state)

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._stop_workers(self._worker_group)


def run_agents(handler: RendezvousHandler) -> None:
    """Both agents take a spec, and give a result."""
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint=train, args=(0.1,))
    WorkerSpec(role="trainer", local_world_size="two", rdzv_handler=handler)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    result = QuietAgent(spec).run()
    assert_type(result.return_values, dict[int, Any])
    assert_type(result.failures, dict[int, ProcessFailure])
    assert_type(LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(tee=Std.ALL)).run().is_failed(), bool)


def run_processes() -> None:
    """Processes without an agent."""
    context = start_processes("trainer", train, {0: (0.1,)}, {0: {"RANK": "0"}}, DefaultLogsSpecs(log_dir="logs"))
    assert_type(context, PContext)
    result = context.wait(timeout=5)
    assert_type(result, RunProcsResult | None)
    if result is not None:
        assert_type(result.failures, dict[int, ProcessFailure])
    context.close()


class HallwayHandler(RendezvousHandler):
    """A rendezvous of a user's own."""

    def get_backend(self) -> str:
        """Return its name."""
        return "hallway"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet nobody."""
        raise RendezvousError

    def is_closed(self) -> bool:
        """Return whether it is closed."""
        return False

    def set_closed(self) -> None:
        """Close it."""

    def num_nodes_waiting(self) -> int:
        """Return how many wait."""
        return 0

    def get_run_id(self) -> str:
        """Return the job."""
        return "job"

    def shutdown(self) -> bool:
        """Return whether it is shut down."""
        return True


def meet(server: EtcdServer) -> None:
    """Handlers by name."""
    parameters = RendezvousParameters("hallway", server.get_endpoint(), "job", 1, 2, join_timeout="5")
    assert_type(parameters.get_as_int("join_timeout"), int | None)
    rendezvous_handler_registry.register("hallway", lambda _: HallwayHandler())
    assert_type(get_rendezvous_handler(parameters), RendezvousHandler)
    assert_type(parse_rendezvous_endpoint("host:29400", default_port=1), tuple[str, int])


def use_timers(path: str) -> None:
    """Timers as context managers, as decorators, and their servers."""
    timer.configure(timer.FileTimerClient(path, signal=SIGABRT))
    with timer.expires(after=60, scope="step") as nothing:
        assert_type(nothing, None)

    @timer.expires(after=5)
    def step(batch: int) -> float:
        return batch / 2

    assert_type(step(4), float)
    timer.expires("soon")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    server = timer.FileTimerServer(path, run_id="job", log_event=lambda _name, _request: None)
    server.start()
    assert_type(server.get_expired_timers(0.0), dict[int, list[timer.FileTimerRequest]])
    server.stop()


class Heard(metrics.MetricHandler):
    """A handler of metrics of a user's own."""

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Print it."""
        sys.stdout.write(f"{metric_data.name}\n")


def use_metrics_and_events() -> None:
    """Metrics and events of a program's own."""
    metrics.configure(Heard())
    metrics.configure(Heard(), group="mine")
    metrics.put_metric("steps", 1)
    assert_type(metrics.getStream("mine").group_name, str)

    @metrics.prof
    def first(batch: int) -> str:
        return str(batch)

    @metrics.prof(group="mine")
    def second(batch: int) -> str:
        return str(batch)

    assert_type(first(1), str)
    assert_type(second(1), str)
    event = events.Event("saved", events.EventSource.WORKER, metadata={"step": 7, "loss": 0.5})
    assert_type(event.serialize(), str)
    assert_type(events.Event.deserialize(event.serialize()), events.Event)
    assert_type(events.get_logging_handler("console"), logging.Handler)
    events.record(event, "console")


def use_the_rest() -> Iterator[int]:
    """Small things."""
    assert_type(get_free_port(), int)
    assert_type(macros.substitute(["--rank=${local_rank}"], "0"), list[str])
    assert_type(compat.is_installed(), bool)
    yield from CyclingIterator(3, lambda epoch: iter(range(epoch)))
