"""The agent's template for foreign subclasses, and what a worker's environment is made of."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import metrics
from elastic_run.agent import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from elastic_run.agent.worker_launch import assign_ranks, worker_environments
from elastic_run.multiprocessing.errors import ProcessFailure
from elastic_run.rendezvous.registry import LocalRendezvousHandler
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta


class ScriptedAgent(SimpleElasticAgent):
    """A subclass as users write them for torch: four hooks, and states from a script."""

    def __init__(self, spec: WorkerSpec, states: list[WorkerState]) -> None:
        super().__init__(spec)
        self.states: Iterator[WorkerState] = iter(states)
        self.calls: list[str] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append(f"start {worker_group.master_addr} {[w.global_rank for w in worker_group.workers]}")
        return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append(f"stop {worker_group.state.value}")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = [worker.global_rank for worker in worker_group.workers]
        return RunResult(next(self.states), return_values=dict.fromkeys(ranks))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append(f"shutdown {death_sig.name} {timeout}")


def _spec(max_restarts: int = 1, **fields: Any) -> WorkerSpec:
    handler = LocalRendezvousHandler("job", local_addr="127.0.0.1")
    return WorkerSpec(
        role="trainer",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint="train",
        max_restarts=max_restarts,
        monitor_interval=0.001,
        **fields,
    )


HEALTHY, FAILED, SUCCEEDED = WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED
START = "start 127.0.0.1 [0, 1]"


@pytest.mark.parametrize(
    ("states", "calls", "final"),
    [
        ([HEALTHY, SUCCEEDED], [START], SUCCEEDED),
        ([FAILED, SUCCEEDED], [START, "stop FAILED", START], SUCCEEDED),
        ([WorkerState.UNHEALTHY, FAILED], [START, "stop UNHEALTHY", START, "stop FAILED"], FAILED),
    ],
)
def test_a_foreign_agent_is_driven_through_its_hooks(
    states: list[WorkerState], calls: list[str], final: WorkerState
) -> None:
    """Start, monitor, restart within the budget, stop and shut down are called as torch calls them."""
    agent = ScriptedAgent(_spec(), states)
    result = agent.run()
    assert result.state == final
    assert agent.calls == [*calls, "shutdown SIGTERM 30"]
    assert [worker.id for worker in agent.get_worker_group().workers] == ["id0", "id1"]


def test_a_foreign_agent_in_an_unknown_state_raises() -> None:
    """A state that means nothing ends the run, after shutting down."""
    agent = ScriptedAgent(_spec(), [WorkerState.UNKNOWN])
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()
    assert agent.calls[-1] == "shutdown SIGTERM 30"


class Collector(metrics.MetricHandler):
    """Keeps the newest value of each metric."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Keep a value."""
        self.values[metric_data.name.removeprefix("workers.trainer.")] = metric_data.value


@pytest.mark.parametrize(
    ("restarts", "final", "flakiness", "outcome"),
    [
        (0, SUCCEEDED, 0, "run_success_no_retries"),
        (1, SUCCEEDED, 25, "run_success_with_retries"),
        (3, SUCCEEDED, 75, "run_success_with_retries"),
        (3, FAILED, 100, "run_failed_with_retries"),
    ],
)
def test_a_run_is_measured_as_torch_measures_it(
    restarts: int, final: WorkerState, flakiness: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flakiness is the used part of the restarts and one, in percent; exactly one of the four outcomes is 1."""
    collector = Collector()
    monkeypatch.setattr(metrics, "_metrics_map", {"torchelastic": collector})
    agent = ScriptedAgent(_spec(max_restarts=3), [*[FAILED] * restarts, final])
    agent.run()
    values = collector.values
    assert values["flakiness"] == flakiness
    assert {name for name, value in values.items() if name.startswith("run_") and value} == {"run_total", outcome}


def test_the_last_state_of_each_worker() -> None:
    """A worker that has not failed was stopped where another one has; a rank that the result lacks is an error."""
    agent = ScriptedAgent(_spec(), [])
    first, second = agent.get_worker_group().workers
    first.global_rank, second.global_rank = 4, 5
    failed = RunResult(FAILED, failures={5: ProcessFailure(1, 71, 3, "")})
    assert [agent._get_worker_state(worker, failed) for worker in (first, second)] == ["TERMINATED", "FAILED"]
    succeeded = RunResult(SUCCEEDED, return_values={4: None})
    assert agent._get_worker_state(first, succeeded) == "SUCCEEDED"
    with pytest.raises(ValueError, match="neither a failure nor a value of rank 5"):
        agent._get_worker_state(second, succeeded)


class BarrierStore:
    """What the exit barrier uses of a store that several agents share."""

    def __init__(self) -> None:
        self.count = 0
        self.is_waited_for = threading.Event()
        self.is_set = threading.Event()

    def add(self, _key: str, amount: int) -> int:
        """Count an agent."""
        self.count += amount
        return self.count

    def set(self, _key: str, _value: str) -> None:
        """All agents are there."""
        self.is_set.set()

    def wait(self, _keys: list[str], timeout: timedelta) -> None:
        """Wait until all agents are there."""
        self.is_waited_for.set()
        if not self.is_set.wait(timeout.total_seconds()):
            raise TimeoutError


def _enter_barrier(store: BarrierStore, nodes: int, timeout: float = DEADLINE) -> None:
    agent = ScriptedAgent(_spec(), [])
    agent._store, agent._exit_barrier_timeout = store, timeout
    agent._worker_group.group_world_size = nodes
    agent._exit_barrier()


def test_agents_of_several_nodes_leave_together() -> None:
    """The first agent waits in the exit barrier until the second one is there; an agent alone waits for nobody."""
    store = BarrierStore()
    first = threading.Thread(target=_enter_barrier, args=(store, 2))
    first.start()
    assert store.is_waited_for.wait(DEADLINE)
    assert not store.is_set.is_set()
    _enter_barrier(store, 2)
    first.join(DEADLINE)
    assert not first.is_alive()
    alone = BarrierStore()
    _enter_barrier(alone, 1)
    assert alone.count == 0


def test_an_agent_leaves_without_the_others_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Where another node does not come in time the job's success stays one, and a line says so."""
    _enter_barrier(BarrierStore(), 2, timeout=0.01)
    assert "not all nodes reached the end of the job" in caplog.text


def test_a_spec_refuses_what_cannot_be() -> None:
    """Sizes, intervals and entry points are checked where the spec is made."""
    for fields in ({"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": ""}):
        values: dict[str, Any] = {"role": "r", "local_world_size": 1, "rdzv_handler": None, "entrypoint": "x", **fields}
        with pytest.raises(AssertionError):
            WorkerSpec(**values)


def _environment(spec: WorkerSpec, parent: dict[str, str], rank: int = 1) -> dict[str, str]:
    group = WorkerGroup(spec)
    assign_ranks(group, 1, 3, (2, 6, 2, 6))
    group.master_addr, group.master_port = "10.0.0.1", 1234
    return worker_environments(
        group,
        parent,
        run_id="job",
        restart_count=2,
        use_agent_store=True,
        signals=(signal.SIGTERM, signal.SIGINT),
    )[rank]


def test_environment() -> None:
    """A worker gets torchrun's variables."""
    assert _environment(_spec(max_restarts=3), {}) == {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_environment_keeps_what_the_user_set() -> None:
    """A preset of NCCL's error handling is passed on."""
    parent = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert _environment(_spec(), parent)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.mark.parametrize(
    ("cuda", "hip", "devices"),
    [(None, None, ("1", None)), ("4, 6", "", ("6", None)), (None, "5,7", ("7", "7")), ("4", "5, 7", ("7", "7"))],
)
def test_virtual_local_rank(cuda: str | None, hip: str | None, devices: tuple[str, str | None]) -> None:
    """Every worker sees its own device only, as device 0; HIP_VISIBLE_DEVICES is read first, and set where it was."""
    named = {"CUDA_VISIBLE_DEVICES": cuda, "HIP_VISIBLE_DEVICES": hip}
    parent = {name: value for name, value in named.items() if value is not None}
    env = _environment(_spec(virtual_local_rank=True), parent)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env.get("HIP_VISIBLE_DEVICES")) == ("0", *devices)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_virtual_local_rank_without_a_device(name: str) -> None:
    """More workers than visible devices are refused by name."""
    with pytest.raises(ValueError, match=f"{name}=4"):
        _environment(_spec(virtual_local_rank=True), {name: "4"})
