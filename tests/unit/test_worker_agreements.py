"""What a worker may ask its peers, and how a script starts its own workers, without torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_run.launcher import LaunchConfig
from elastic_run.worker import collectives, launching
from elastic_run.worker.place import WorkerError


def refuse(_: object = None) -> int:
    """Raise as torch does without a group."""
    message = "Default process group has not been initialized"
    raise ValueError(message)


@pytest.mark.parametrize(
    ("is_available", "group_size", "workers", "expected"),
    [
        (True, 2, 1, True),
        (True, 1, 4, False),
        (True, -1, 4, "rank 3 is not in this group"),
        (True, None, 1, False),
        (True, None, 4, "this is one of 4 workers, but there is no process group"),
        (False, None, 1, False),
    ],
)
def test_whether_a_worker_has_peers(
    monkeypatch: pytest.MonkeyPatch, group_size: int | None, workers: int, *, expected: bool | str, is_available: bool
) -> None:
    """A worker with a process group may have peers. A worker without one must be the only worker."""
    size = refuse if group_size is None else lambda _: group_size
    module = SimpleNamespace(
        is_available=lambda: is_available,
        is_initialized=lambda: group_size is not None,
        get_world_size=size,
        get_rank=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=module))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setattr(collectives, "world_size", lambda: workers)
    if isinstance(expected, str):
        with pytest.raises(WorkerError, match=f"^{expected}"):
            collectives.has_peers(None)
    else:
        assert collectives.has_peers(None) is expected


def test_a_number_of_workers_is_a_configuration_of_this_node_without_restarts() -> None:
    """A number, 1 too, becomes such a configuration. A given configuration is used unchanged."""
    made = launching._configuration(1)
    assert (made.min_nodes, made.max_nodes, made.nproc_per_node, made.max_restarts) == (1, 1, 1, 0)
    given = LaunchConfig(min_nodes=1, max_nodes=2, nproc_per_node=4)
    assert launching._configuration(given) is given
    with pytest.raises(ValueError, match="at least 1 worker"):
        launching._configuration(0)
    for wrong in ("2", True, None):
        with pytest.raises(TypeError, match="it is a number of workers, or a LaunchConfig"):
            launching._configuration(wrong)


@pytest.mark.parametrize(
    ("shape", "splits", "expected"),
    [
        ((4,), (None, None), ([2, 2], [2, 2])),
        ((4, 3), (None, [1, 0]), ([2, 2], [1, 0])),
        ((4,), ([3, 1], None), ([3, 1], [7, 7])),
        ((4,), ([4, 0], [0, 5]), ([4, 0], [0, 5])),
        ((), (None, None), "all_to_all sends rows"),
        ((3,), (None, None), "3 rows can't be shared out equally among 2 ranks"),
        ((4,), ([3, 2], None), r"input_splits=\[3, 2\] are 5 rows, but the tensor has 4"),
        ((4,), ([5, -1], None), r"input_splits=\[5, -1\]: it must be 2 numbers from 0"),
        ((4,), (None, [1]), r"output_splits=\[1\]: it must be 2 numbers from 0"),
    ],
)
def test_how_many_rows_go_and_come(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    splits: tuple[list[int] | None, list[int] | None],
    expected: tuple[list[int], list[int]] | str,
) -> None:
    """By default each rank gets equally many rows. If the caller gives only the rows to send, the peers are asked."""
    rows: Any = SimpleNamespace(dim=lambda: len(shape), shape=shape, device="cpu")
    kind = SimpleNamespace(apply=lambda _, sent, received, __: (sent, received))
    monkeypatch.setattr(collectives, "has_peers", lambda _: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(collectives, "_exchange_sizes", lambda *_: [7, 7])
    monkeypatch.setattr(collectives, "_exchange_type", lambda: kind)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{expected}"):
            collectives.all_to_all(rows, *splits)
    else:
        found: object = collectives.all_to_all(rows, *splits)
        assert found == expected
