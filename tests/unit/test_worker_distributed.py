"""What a worker is among the others, and how it leaves its process group, with a stand-in for torch."""

from __future__ import annotations

import datetime as dt
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.worker import distributed, joining
from elastic_run.worker.place import Choice, Place


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, (5, 8, False)),
        (SimpleNamespace(is_available=lambda: False), (5, 8, False)),
        (SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False), (5, 8, False)),
        (
            SimpleNamespace(
                is_available=lambda: True,
                is_initialized=lambda: True,
                get_rank=lambda: 0,
                get_world_size=lambda: 2,
            ),
            (0, 2, True),
        ),
    ],
    ids=["no torch", "torch without it", "no group yet", "a group"],
)
def test_the_process_group_counts_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    module: SimpleNamespace | None,
    expected: tuple[int, int, bool],
) -> None:
    """The script may have made one of fewer ranks; torch is not imported for the answer."""
    if module is None:
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setattr(distributed, "find_place", lambda: Place(5, 8, 1, 4, "environment"))
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == expected
    assert distributed.local_rank() == 1


@pytest.mark.parametrize(
    ("has_failed", "is_initialized", "backend", "expected"),
    [
        (False, True, "gloo", ["destroy", "wait"]),
        (False, False, "gloo", ["wait"]),
        (True, True, "gloo", ["keep"]),
        (True, True, "cpu:gloo,cuda:nccl", []),
        (True, False, "gloo", []),
    ],
)
def test_how_a_worker_leaves(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: list[str], *, has_failed: bool, is_initialized: bool
) -> None:
    """After a failure nothing is waited for, and a group of gloo is kept, since its end would wait for the others."""
    done: list[str] = []
    module = SimpleNamespace(is_initialized=lambda: is_initialized)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=module))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setattr(joining, "has_failed", lambda: has_failed)
    monkeypatch.setattr(joining, "destroy_groups", lambda: done.append("destroy"))
    monkeypatch.setattr(joining, "keep_groups", lambda: done.append("keep"))
    joined: Any = distributed._Joined()
    monkeypatch.setattr(distributed, "_joined", joined)
    distributed._leave()
    assert done == []  # this process has made no group
    joined.context, joined.pid = SimpleNamespace(backend=backend), os.getpid()
    distributed._leave()
    assert done == []
    joined.barrier = SimpleNamespace(wait_leaving=lambda: done.append("wait"))
    distributed._leave()
    assert done == expected
    joined.pid = 1  # a fork: the group is its parent's
    distributed._leave()
    assert done == expected


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, 600.0), (2.5, 2.5), (dt.timedelta(minutes=1), 60.0), (0, None), (-1.0, None)]
)
def test_a_timeout_is_a_number_of_seconds_or_a_span(
    timeout: float | dt.timedelta | None, seconds: float | None
) -> None:
    """More than 0; ten minutes where the script names none."""
    if seconds is None:
        with pytest.raises(ValueError, match="it must be more than 0 s"):
            distributed._parse_timeout(timeout)
    else:
        assert distributed._parse_timeout(timeout).total_seconds() == seconds


@pytest.mark.parametrize(("launcher", "device"), [("slurm", "cuda:1"), ("environment", "cpu")])
def test_a_worker_joins_again_under_another_number(monkeypatch: pytest.MonkeyPatch, launcher: str, device: str) -> None:
    """The group is left at the end once; under Slurm the variables of a launcher are set, and none is replaced."""
    done: list[object] = []
    cuda = SimpleNamespace(set_device=lambda index: done.append(f"device {index}"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str, cuda=cuda))
    monkeypatch.setattr(joining, "join", lambda *_, timeout, generation: done.append((timeout, generation)))
    monkeypatch.setattr(distributed, "atexit", SimpleNamespace(register=done.append))
    monkeypatch.setattr(distributed, "_joined", distributed._Joined())
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.delenv("RANK")
    place, choice, limit = Place(1, 2, 1, 2, launcher, "node0", 29500), Choice("gloo", device), dt.timedelta(1)
    context = distributed._join(place, choice, limit)
    assert (context.rank, context.world_size, context.local_rank, context.local_world_size) == (1, 2, 1, 2)
    assert (str(context.device), context.backend, context.launcher) == (device, "gloo", launcher)
    assert (os.environ.get("RANK"), os.environ["WORLD_SIZE"]) == ("1" if launcher == "slurm" else None, "9")
    distributed._join(place, choice, limit)
    chosen = ["device 1"] if device == "cuda:1" else []
    assert done == [*chosen, (limit, 0), distributed._leave, *chosen, (limit, 1)]


class Group:
    """A process group."""


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("version", ["2.7.1", "2.8.0"])
def test_a_group_that_the_program_holds_is_never_destroyed(
    monkeypatch: pytest.MonkeyPatch, version: str, *, is_held: bool
) -> None:
    """Before torch 2.8 none is. Models let go first, then the group."""
    groups = [Group()]
    held = groups[:] if is_held else []
    done: list[str] = []

    def destroy() -> None:
        groups.clear()
        done.append("destroyed")

    torch = SimpleNamespace(__version__=version, distributed=SimpleNamespace(destroy_process_group=destroy))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    torch.distributed.distributed_c10d = SimpleNamespace(_world=SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(joining, "_release_models", lambda: done.append("models"))
    monkeypatch.setattr(joining, "_keep", lambda kept: done.extend(f"kept {type(group).__name__}" for group in kept))
    joining.destroy_groups()
    before = ["kept Group"] if version < "2.8" else []
    assert done == [*before, "models", "destroyed", *["kept Group" for _ in held]]
    groups[:] = [Group()]
    done.clear()
    joining.keep_groups()
    assert done == ["kept Group"]


def test_a_kept_object_outlives_its_last_name() -> None:
    """Also where Python clears its modules."""
    group: Any = Group()
    before = sys.getrefcount(group)
    joining._keep([group])
    assert sys.getrefcount(group) == before + 1


@pytest.mark.parametrize("error", [None, ValueError()])
def test_an_exception_that_ends_the_process_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Python notes it before the functions at the end run."""
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert joining.has_failed() is (error is not None)
