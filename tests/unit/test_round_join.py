"""A node joins a round: which store its workers get, and under which address."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_run.agent import WorkerGroup, WorkerSpec, worker_launch
from elastic_run.agent.context import AgentContext, AgentOptions
from elastic_run.agent.worker_launch import RoundJoin
from elastic_run.core.config import AgentConfig, JobConfig
from elastic_run.multiprocessing import DefaultLogsSpecs
from elastic_run.rendezvous.registry import LocalRendezvousHandler
from elastic_run.signals import SIGTERM
from elastic_run.store.errors import UNKNOWN


class _Store:
    """A workers' store that is served nowhere."""

    host, port, use_agent_store = "127.0.0.1", 1234, True

    def __init__(self, mode: str, on_refusal: Any) -> None:
        self.mode = mode
        self.refuse = on_refusal
        self.is_closed = False

    def renew(self) -> _Store:
        """Open the next one."""
        return _Store(f"renewed {self.mode}", self.refuse)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open no port."""

    def open_store(*, by_agent: bool, on_refusal: Any, **_: Any) -> _Store:
        return _Store("agent" if by_agent else "rank0", on_refusal)

    monkeypatch.setattr(worker_launch, "open_worker_store", open_store)


def make_group(handler: Any = None, **fields: Any) -> WorkerGroup:
    """Make the group of two workers."""
    handler = handler or LocalRendezvousHandler("job", local_addr="127.0.0.1")
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint="train", **fields)
    return WorkerGroup(spec)


def make_join(group: WorkerGroup, requested: str = "auto") -> RoundJoin:
    """Make what joins the rounds of an agent."""
    options = AgentOptions(JobConfig(), agent_config=AgentConfig(worker_store=requested))
    context = AgentContext(group, DefaultLogsSpecs(), options)
    context.console = cast("Any", SimpleNamespace(say=lambda _: None))
    return RoundJoin(context)


def test_each_round_has_a_fresh_store_at_the_offered_address() -> None:
    """The workers get the address that the agent gives to the rendezvous."""
    group = make_group()
    join = make_join(group)
    modes = []
    for _ in range(2):
        join.offer_store()
        join.take_place()
        modes.append(cast("_Store", join.store).mode)
        assert (group.master_addr, group.master_port) == ("127.0.0.1", 1234)
    assert modes == ["agent", "renewed agent"]


@pytest.mark.parametrize(("requested", "next_one"), [("auto", "rank0"), ("agent", "rank0"), ("rank0", "renewed rank0")])
def test_the_round_after_an_unknown_operation_has_torchs_store(requested: str, next_one: str) -> None:
    """It takes the place of the agent's own store, which ends."""
    join = make_join(make_group(), requested)
    first: Any = join.renew_store()
    if requested != "rank0":
        first.refuse(UNKNOWN, "operation 77")
    second: Any = join.renew_store()
    assert join.store == second
    assert first.is_closed == (requested != "rank0")
    assert second.mode == next_one
    third: Any = join.renew_store()
    assert third.mode == f"renewed {next_one}"


@pytest.mark.parametrize(
    ("named", "info", "expected"),
    [
        ({"master_addr": "head", "master_port": 29500}, ("other", 7), ("head", 29500)),
        ({"master_addr": "head", "master_port": 29500}, None, ("head", 29500)),
        ({}, ("other", 7), ("other", 7)),
        ({}, None, (None, None)),
    ],
)
def test_the_address_of_a_round_of_a_foreign_handler(
    named: dict[str, Any], info: tuple[str, int] | None, expected: tuple[str | None, int | None]
) -> None:
    """It opens its store itself: the spec's address counts, or else the handler's."""
    found = LocalRendezvousHandler("job", local_addr="127.0.0.1").next_rendezvous()
    place = None if info is None else SimpleNamespace(master_addr=info[0], master_port=info[1])
    result = SimpleNamespace(store=found.store, rank=0, world_size=1, bootstrap_store_info=place)
    group = make_group(SimpleNamespace(next_rendezvous=lambda: result, get_run_id=lambda: "job"), **named)
    make_join(group).take_place()
    assert (group.master_addr, group.master_port) == expected
    assert [worker.global_rank for worker in group.workers] == [0, 1]


def test_workers_that_start_early_get_the_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any other round; the signals that stop the job are blocked before the first worker starts."""
    group = make_group()
    options = AgentOptions(JobConfig(), is_whole_process=True, signals=(SIGTERM,))
    logs_specs = DefaultLogsSpecs()
    context = AgentContext(group, logs_specs, options)
    steps: list[Any] = []
    monkeypatch.setattr(AgentContext, "block_signals", lambda _, numbers: steps.append(("block", *numbers)))
    monkeypatch.setattr(AgentContext, "adopt_orphans", lambda _: None)

    def launch(*_: object, use_agent_store: bool, **__: object) -> SimpleNamespace:
        steps.append(("launch", use_agent_store))
        return SimpleNamespace()

    monkeypatch.setattr(worker_launch, "launch_workers", launch)
    early = worker_launch.start_early(context)
    assert early is not None
    assert steps == [("block", SIGTERM), ("launch", True)]
    assert (group.master_addr, group.master_port) == ("127.0.0.1", 1234)
