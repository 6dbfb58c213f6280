"""The flight recorder of a worker: from the import of torch.distributed on, and its dump on request and at the end."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pickle
import sys
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import contract
from elastic_run.diagnosis import recorder
from elastic_run.diagnosis.dumps import OPEN, Collective, Dump, find_dumps
from elastic_run.diagnosis.recorder import count_collectives, list_calls, serve, write_dump
from elastic_run.diagnosis.trace_analysis import analyse
from elastic_run.diagnosis.trace_findings import first_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MODULE = "stands_for_torch_distributed"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Give the names of the sockets at which this process answers; the module has not been imported."""
    names: list[str] = []
    (tmp_path / f"{_MODULE}.py").write_text("VALUE = 7\n")
    monkeypatch.setattr(recorder, "_TRIGGER", _MODULE)
    monkeypatch.setattr(recorder, "serve", names.append)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(contract.ENV_FLIGHT_RECORDER, "elastic-run-1")
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    return names


def test_the_recorder_is_served_from_the_import_on(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the module's own code; other imports are left alone, and the variable does not reach a child."""
    finders = list(sys.meta_path)
    recorder.begin()
    assert contract.ENV_FLIGHT_RECORDER not in os.environ
    assert (served, sys.meta_path[1:]) == ([], finders)
    importlib.import_module("colorsys")
    assert served == []
    module = importlib.import_module(_MODULE)
    monkeypatch.setitem(sys.modules, _MODULE, module)
    assert (module.VALUE, served, sys.meta_path) == (7, ["elastic-run-1"], finders)


def test_a_fork_of_a_template_that_has_imported_it_serves_at_once(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no import to wait for."""
    monkeypatch.setitem(sys.modules, _MODULE, sys)
    recorder.begin()
    assert served == ["elastic-run-1"]


#: An entry as torch writes it, of a collective that has ended.
_ENDED = {
    "record_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "profiling_name": "gloo:barrier",
    "state": "completed",
    "retired": True,
}


@pytest.mark.parametrize(
    ("completed", "retired", "answer"),
    [
        (7, [True, True], b"done 0=7/-1/7"),
        (6, [True, False], b"open 0=7/-1/6"),
        (6, [True, True], b"done 0=7/-1/6"),  # gloo's threads have written the count in the wrong order
    ],
)
def test_a_collective_is_open_where_an_entry_says_so_too(
    monkeypatch: pytest.MonkeyPatch, completed: int, retired: list[bool], answer: bytes
) -> None:
    """A count of completed collectives that lags behind for ever makes nobody wait."""
    numbers = {"last_enqueued_collective": 7, "last_started_collective": -1, "last_completed_collective": completed}

    def dump(has_entries: bool, _stacks: bool, _active: bool) -> bytes:
        entries = [{"retired": is_retired} for is_retired in retired] if has_entries else []
        return pickle.dumps({"pg_status": {"0": numbers}, "entries": entries})

    _replace_torch(monkeypatch, dump, ranks=[])
    assert count_collectives() == answer


def _replace_torch(
    monkeypatch: pytest.MonkeyPatch, dump: Callable[..., bytes], ranks: list[int], *backends: str
) -> None:
    """Let a recorder stand for torch's, and a default group of some ranks, or none; with backends as in torch 2.15."""
    group = ModuleType("group")
    group.group_desc = "default_pg"  # type: ignore[attr-defined]
    world = SimpleNamespace(pg_names={group: "0"} if ranks else {}, pg_group_ranks={group: ranks})
    core, distributed = ModuleType("torch._C"), ModuleType("torch.distributed")
    core._distributed_c10d = SimpleNamespace(_dump_fr_trace=dump)  # type: ignore[attr-defined]
    group._device_types = list(backends)  # type: ignore[attr-defined]
    group._get_backend = lambda name: SimpleNamespace(name=lambda: name)  # type: ignore[attr-defined]
    distributed.distributed_c10d = SimpleNamespace(_world=world)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch._C", core)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


def test_the_times_of_new_collectives_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those before the first answer, nor those whose duration comes later; a lost entry makes the others count."""
    ring = [_make_entry(0, "gloo:all_reduce"), _make_entry(1, "nccl:all_reduce", duration_ms=2.5)]

    def dump(has_entries: bool, _active: bool) -> bytes:
        state = [(entry["record_id"], entry["retired"]) for entry in ring]
        document = {"entries": ring if has_entries else [], "pg_config": {}, "pg_status": state}
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    _replace_torch(monkeypatch, lambda *_: b"", ranks=[4, 6])
    sys.modules["torch._C"]._distributed_c10d._dump_fr_trace_json = dump
    monkeypatch.setattr(recorder, "_told", {})
    assert list_calls() == b"[]"
    names = ["gloo:all_reduce", "gloo:broadcast", "gloo:send 0->1", "nccl:_all_gather_base", "nccl:all_reduce"]
    ring += [_make_entry(2 + number, name) for number, name in enumerate(names)]
    ring[5] |= {"duration_ms": 1.5}
    ring[6] |= {"retired": False}
    gloo = {"group": "gloo 0 4", "size": 2, "is_measured": False, "scale": 1.0, "calls": [[2, 2000]]}
    nccl = {"group": "nccl 0 4", "size": 2, "is_measured": True, "scale": 1.0, "calls": [[5, -1500]]}
    assert json.loads(list_calls()) == [nccl, gloo]
    assert list_calls() == b"[]"
    ring[6] |= {"retired": True, "duration_ms": 3.5}
    assert json.loads(list_calls()) == [nccl | {"calls": [[6, -3500]]}]
    ring[:] = [_make_entry(8, "gloo:barrier"), _make_entry(9, "nccl:all_reduce")]  # without TORCH_NCCL_ENABLE_TIMING
    assert json.loads(list_calls()) == [gloo | {"scale": 1.5, "calls": [[8, 8000]]}]


def _make_entry(number: int, name: str, **changes: object) -> dict[str, Any]:
    fields = {"record_id": number, "collective_seq_id": number, "time_created_ns": number * 1_000_000}
    return {**fields, "process_group": ("0", "default_pg"), "profiling_name": name, "retired": True, **changes}


def test_another_thread_has_the_compiler_while_a_dump_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dump goes without torch's compiler, but a program that uses it in that moment gets it."""
    seen: list[object] = []

    def dump(*_: bool) -> bytes:
        seen.append(getattr(sys.modules["torch"]._inductor, "config", None))
        thread = Thread(target=lambda: seen.append(sys.modules["torch"]._inductor.config))
        thread.start()
        thread.join()
        return pickle.dumps({"pg_config": {}, "entries": []})

    _replace_torch(monkeypatch, dump, ranks=[0, 1])
    compiler = ModuleType("torch._inductor")
    compiler.config = "the program's"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor", compiler)
    monkeypatch.setenv(contract.ENV_RECORDER_PREFIX[0], str(tmp_path / "rank_"))
    monkeypatch.setenv(contract.ENV_RANK, "1")
    assert write_dump(has_stacks=True)
    assert seen == [None, "the program's"]
    assert not hasattr(sys.modules["torch"], "_inductor")


@pytest.mark.parametrize("ranks", [[0, 1], []], ids=["group", "no group"])
def test_a_rank_without_any_collective_leaves_a_dump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: list[int]
) -> None:
    """The rank that does not even join the first one is accused, once it has a process group; else it is unknown."""
    _replace_torch(monkeypatch, lambda *_: pickle.dumps({"pg_config": {}, "entries": []}), ranks)
    monkeypatch.setenv(contract.ENV_RECORDER_PREFIX[0], str(tmp_path / "rank_"))
    monkeypatch.setenv(contract.ENV_RANK, "1")
    assert write_dump(has_stacks=False) is bool(ranks)
    waiting = Collective(0, "0", "default_pg", 1, "barrier", OPEN)
    peer = Dump(0, (waiting,), {"0": (0, 1)})
    found = analyse([peer, *find_dumps([str(tmp_path)]).dumps])
    expected = "rank 1 did not join barrier number 1 of group 'default', in which rank 0 waits"
    assert (first_line(found) == expected) is bool(ranks)


def test_a_dump_has_the_calls_of_all_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each backend of a group has a recorder and numbers of its own, and all calls count in the order of time."""
    recorded = {
        "gloo": [_ENDED | {"time_created_ns": 10}, _ENDED | {"time_created_ns": 30, "collective_seq_id": 2}],
        "nccl2": [_ENDED | {"profiling_name": "nccl2:all_reduce", "time_created_ns": 20, "record_id": 7}],
        "of:us": [_ENDED | {"profiling_name": "of:us:recv 1<-?", "time_created_ns": 40, "p2p_seq_id": 1}],
    }

    def dump(*_: bool, backend: str = "gloo") -> bytes:
        """(… backend: str) -> bytes."""
        return pickle.dumps({"entries": recorded.get(backend, []), "pg_config": {}, "version": backend})

    _replace_torch(monkeypatch, dump, [0, 1], "gloo", "of:us")
    monkeypatch.setenv(contract.ENV_RECORDER_PREFIX[0], str(tmp_path / "rank_"))
    monkeypatch.setenv(contract.ENV_RANK, "1")
    assert write_dump(has_stacks=False)
    (written,) = find_dumps([str(tmp_path)]).dumps
    assert [(call.library, call.operation, call.sequence, call.record) for call in written.collectives] == [
        *(
            ("gloo", "barrier", 1, 7),
            ("nccl2", "all_reduce", 1, 8),
            ("gloo", "barrier", 2, 9),
            ("of:us", "recv", 1, 10),
        ),
    ]
    ahead = Collective(8, "0", "default_pg", 2, "all_reduce", OPEN, library="nccl2")
    assert first_line(analyse([written, Dump(0, (*written.collectives[:3], ahead), {"0": (0, 1)})])) == (
        "rank 1 did not join all_reduce number 2 of group 'default', in which rank 0 waits"
    )


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_dump_of_torch_is_not_replaced_by_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_torchs: bool
) -> None:
    """A backend that gives up writes its dump itself; a dump that was there before the worker is of another job."""
    _replace_torch(monkeypatch, lambda *_: pickle.dumps({"entries": []}), [0, 1])
    monkeypatch.setenv(contract.ENV_RECORDER_PREFIX[0], str(tmp_path / "rank_"))
    monkeypatch.setenv(contract.ENV_RANK, "1")
    monkeypatch.setattr(recorder, "_replaceable", [None])
    monkeypatch.setattr(atexit, "register", lambda _: None)
    if not is_torchs:
        (tmp_path / "rank_1").write_bytes(b"of torch")
    serve(f"elastic-run-test-{tmp_path}")
    if is_torchs:
        assert write_dump(has_stacks=False)
        (tmp_path / "rank_1").write_bytes(b"of torch")
    assert write_dump(has_stacks=False) is not is_torchs
    assert ((tmp_path / "rank_1").read_bytes() == b"of torch") is is_torchs
