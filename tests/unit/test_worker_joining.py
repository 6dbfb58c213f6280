"""What a worker is among the others, how it joins and leaves, and what it says of the ranks that do not come."""

from __future__ import annotations

import datetime as dt
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.worker import distributed, joining
from elastic_run.worker.joining import RankBarrier
from elastic_run.worker.place import Choice, JoinError, Place


# --- the ranks that do not come ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("missing", "told"), [(8, "6, 7, 8 (did"), (9, "6, 7, 8 and 1 more (did")])
def test_eight_missing_ranks_are_named(missing: int, told: str) -> None:
    """Of more the number is told."""
    nobody: Any = SimpleNamespace(check=lambda _: False)
    barrier = RankBarrier(Place(0, missing + 1, 0, 1, "environment"), nobody, dt.timedelta(seconds=1))
    error = barrier.failure("not all have come", RuntimeError("timeout"), recorded="host")
    assert f"{missing} of {missing + 1} missing: rank 1, 2, 3, 4, 5, {told}" in str(error)


class Store:
    """A store that does not wait: a missing key is a timeout at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self.values[key]

    def add(self, key: str, count: int) -> int:
        """Count."""
        found = int(self.values.get(key, b"0")) + count
        self.values[key] = b"%d" % found
        return found

    def check(self, keys: list[str]) -> bool:
        """Whether all values are there."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], _: dt.timedelta) -> None:
        """Wait for values."""
        if not self.check(keys):
            message = f"wait timeout: {keys}"
            raise RuntimeError(message)


def make_barrier(store: Any, rank: int, size: int = 2, *, serves_store: bool = False) -> RankBarrier:
    """Return the barrier of a rank."""
    place = Place(rank, size, 0, 1, "environment", serves_store=serves_store)
    return RankBarrier(place, store, dt.timedelta(seconds=1))


def test_a_rank_that_is_lost_later_is_told_with_its_host() -> None:
    """It has come, and has not made its process group; of a rank that never came the host is not known."""
    store = Store()
    with pytest.raises(JoinError, match=r"1 of 2 missing: rank 0 \(did they fail earlier, or never start\?\)"):
        make_barrier(store, 1).wait_all_ranks()
    barrier = make_barrier(store, 0)
    barrier.wait_all_ranks()
    error = barrier.failure("the first all-reduce failed", RuntimeError("timeout"), recorded="connected")
    assert f"1 of 2 missing: rank 1 on {os.uname().nodename} (did they fail? if not" in str(error)
    make_barrier(store, 1).record_connected()
    error = barrier.failure("the first all-reduce failed", RuntimeError("timeout"), recorded="connected")
    assert "every other rank is there, so connections between them fail" in str(error)


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_worker_that_could_not_join_lets_the_others_ask_for_the_missing(
    monkeypatch: pytest.MonkeyPatch, *, has_failed: bool
) -> None:
    """It waits at its end, after its error, since it may serve the store in which the others look."""
    at_exit: list[tuple[object, ...]] = []
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(PrefixStore=lambda _, store: store))
    monkeypatch.setattr(joining, "_open_store", lambda *_: Store())
    monkeypatch.setattr(joining, "atexit", SimpleNamespace(register=lambda *call: at_exit.append(call)))
    place, choice = Place(0, 1, 0, 1, "none"), Choice("gloo", "cpu")

    def connect(*_: object) -> None:
        if has_failed:
            raise JoinError

    monkeypatch.setattr(joining, "_connect", connect)
    if has_failed:
        with pytest.raises(JoinError):
            joining.join(place, choice, timeout=dt.timedelta(seconds=1), generation=0)
        ((wait, limit),) = at_exit
        assert (getattr(wait, "__name__", ""), limit) == ("wait_leaving", dt.timedelta(seconds=60))
    else:
        joining.join(place, choice, timeout=dt.timedelta(seconds=1), generation=0)
        assert at_exit == []


@pytest.mark.parametrize(("backend", "is_destroyed"), [("gloo", True), ("cpu:gloo,cuda:nccl", False)])
@pytest.mark.parametrize(("total", "problem"), [(2.0, ""), (3.0, "the sum over 2 ranks is 3 instead of 2")])
def test_a_group_counts_once_an_all_reduce_has_proved_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, total: float, problem: str, *, is_destroyed: bool
) -> None:
    """A wrong sum is a failure; NCCL's group is left then, since its end would wait."""
    done: list[str] = []
    distributed = SimpleNamespace(
        is_initialized=lambda: True,
        all_reduce=lambda _tensor, async_op: SimpleNamespace(wait=lambda _: done.append(f"waits {async_op}")),
        destroy_process_group=lambda: done.append("destroyed"),
    )
    one = SimpleNamespace(item=lambda: total)
    torch = SimpleNamespace(ones=lambda _, device: one if device == "cpu" else None, distributed=distributed)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(joining, "_make_group", lambda barrier, _: barrier.record_connected())
    barrier = make_barrier(Store(), 0)
    if problem:
        with pytest.raises(JoinError, match=f"the first all-reduce failed .*{problem}"):
            joining._connect(barrier, Choice(backend, "cpu"))
    else:
        joining._connect(barrier, Choice(backend, "cpu"))
    assert done == ["waits True", *(["destroyed"] if problem and is_destroyed else [])]


@pytest.mark.parametrize(
    ("backend", "device", "bound"), [("nccl", "cuda:1", "cuda:1"), ("gloo", "cuda:1", None), ("gloo", "cpu", None)]
)
def test_only_a_group_of_nccl_is_bound_to_its_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, bound: str | None
) -> None:
    """So NCCL connects at once, on the right device; other backends take none."""
    made: list[dict[str, object]] = []
    module = SimpleNamespace(init_process_group=lambda _, **options: made.append(options), nn=None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str, distributed=module))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setitem(sys.modules, "torch.distributed.nn", SimpleNamespace())
    barrier = make_barrier(Store(), 1)
    joining._make_group(barrier, Choice(backend, device))
    (options,) = made
    expected = {"store": barrier.store, "rank": 1, "world_size": 2, "timeout": barrier.timeout, "device_id": bound}
    assert options == expected
    assert barrier.store.check(["connected/1"])


def test_the_store_waits_for_nobody_and_may_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing rank is told by the barrier, and a process may make its group again; without a launcher it is alone."""
    module = SimpleNamespace(TCPStore=lambda *values, **options: (values, options), HashStore=lambda: "own")
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    limit = dt.timedelta(seconds=1)
    place = Place(0, 2, 0, 1, "environment", "node0", 29500, serves_store=True)
    values = ("node0", 29500, 2, True, limit)
    made: list[object] = [joining._open_store(each, limit) for each in (place, Place(0, 1, 0, 1, "none"))]
    assert made == [(values, {"wait_for_workers": False, "multi_tenant": True}), "own"]


# --- joining and leaving, with a stand-in for torch -------------------------------------------------------------------
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
    c10d = SimpleNamespace(_world=SimpleNamespace(pg_map=groups))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
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
