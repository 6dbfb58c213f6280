"""What a worker answers when it is asked for its collectives, with stand-ins for torch's recorders."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from elastic_run.diagnosis.recorder_server import count_collectives


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

    def dump(has_entries: bool, _stacks: bool, _active: bool) -> bytes:  # noqa: FBT001 - as torch calls it
        entries = [{"retired": is_retired} for is_retired in retired] if has_entries else []
        return pickle.dumps({"pg_status": {"0": numbers}, "entries": entries})

    core = ModuleType("torch._C")
    core._distributed_c10d = SimpleNamespace(_dump_fr_trace=dump)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch._C", core)
    assert count_collectives() == answer
