"""Collectives that a fault alters, with stand-ins for torch's process group."""

from __future__ import annotations

import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.agent.faults import ALTERED, ARMED
from elastic_run.diagnosis.altered_collectives import Alteration

if TYPE_CHECKING:
    from collections.abc import Callable


class Tensor:
    """A tensor of some numbers."""

    def __init__(self, size: int, device: str = "cuda:1") -> None:
        self.size = size
        self.device = device

    def flatten(self) -> Tensor:
        """Return the numbers in a row."""
        return self

    def repeat(self, times: int) -> Tensor:
        """Return the numbers several times."""
        return Tensor(self.size * times)


class Group:
    """A process group that notes its calls."""

    def __init__(self, name: str = "0") -> None:
        self.group_name = name
        self.calls: list[tuple[Any, ...]] = []


def _make_method(name: str) -> Callable[..., str]:
    def call(group: Group, tensors: list[Tensor], options: str = "") -> str:
        group.calls.append((name, tensors[0].size, tensors[0].device, options))
        return f"work of {name}"

    return call


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    """Give a class in place of torch's ProcessGroup, which the program has imported."""
    methods = {name: _make_method(name) for name in ("allreduce", "broadcast", "allgather")}
    made = type("ProcessGroup", (Group,), methods)
    torch, core = ModuleType("torch"), ModuleType("torch._C._distributed_c10d")
    torch.__dict__["ones"] = Tensor
    torch.__dict__["distributed"] = SimpleNamespace(
        BroadcastOptions=lambda: "broadcast", AllreduceOptions=lambda: "allreduce"
    )
    torch.__dict__["futures"] = SimpleNamespace(Future=lambda: SimpleNamespace(set_result=lambda _: None))
    core.__dict__["_create_work_from_future"] = lambda _: "done"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", core)
    monkeypatch.setitem(
        sys.modules,
        "torch.distributed.distributed_c10d",
        SimpleNamespace(ProcessGroup=made),
    )
    return made


@pytest.mark.parametrize(
    ("action", "altered"),
    [("wrong-shape", ("allreduce", 8, "cuda:1", "")), ("wrong-collective", ("broadcast", 4, "cuda:1", "broadcast"))],
)
def test_one_call_is_altered(kind: Any, action: str, altered: tuple[Any, ...]) -> None:
    """The fault alters the next call only. After it, all methods of the class are torch's own again."""
    original = kind.allreduce
    alteration = Alteration(action)
    assert alteration.begin()
    group = kind()
    assert group.allreduce([Tensor(4)]).startswith("work of")
    assert group.allreduce([Tensor(4)]) == "work of allreduce"
    assert group.calls == [altered, ("allreduce", 4, "cuda:1", "")]
    assert kind.allreduce is original


def test_another_collective_than_an_all_reduce_becomes_one(kind: Any) -> None:
    """The peers wait for what this rank does not call."""
    Alteration("wrong-collective").begin()
    group = kind()
    group.allgather([Tensor(9)])
    assert group.calls == [("allreduce", 4, "cuda:1", "allreduce")]


def test_a_process_group_that_skips_goes_on_to_skip(kind: Any) -> None:
    """The first group that is used after the request skips its calls, and returns work that is done. Others go on."""
    Alteration("skip-collective").begin()
    first, second = kind("1"), kind("2")
    assert [first.allreduce([Tensor(4)]), first.broadcast([Tensor(4)])] == ["done", "done"]
    assert second.allreduce([Tensor(4)]) == "work of allreduce"
    assert (first.calls, len(second.calls)) == ([], 1)


def test_a_program_without_the_package_is_not_altered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for the import asks again."""
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", None)
    assert not Alteration("skip-collective").begin()


def test_the_launcher_is_told_when_a_collective_was_altered(kind: Any) -> None:
    """The worker answers the launcher's request, and writes again when the call was altered."""
    alteration = Alteration("wrong-shape")
    alteration.begin()
    own, launcher = socket.socketpair()
    with own, launcher:
        launcher.settimeout(0)
        alteration.answer_on(own)
        assert launcher.recv(64) == ARMED
        kind().allreduce([Tensor(4)])
        assert launcher.recv(64) == ALTERED
