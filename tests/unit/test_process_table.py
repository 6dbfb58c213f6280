"""What is read of /proc, again and again, in the launcher and in the guardian."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic_run.multiprocessing.process.process_table import _with_descendants, read_stat


def test_a_look_at_a_process_leaves_no_descriptor_open() -> None:
    """The launcher of a job of months looks at its workers many times."""
    before = [*Path("/proc/self/fd").iterdir()]
    for _ in range(3):
        stat = read_stat(os.getpid())
        assert stat is not None
        assert (stat.parent, stat.session) == (os.getppid(), os.getsid(0))
        assert read_stat(4194305) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_descendants_are_found_at_any_depth() -> None:
    """Each process below one that was found, whatever the order of the pids; no other one."""
    parents = {2: 7, 3: 2, 5: 3, 7: 1, 8: 1, 9: 8}
    living: Any = {pid: SimpleNamespace(parent=parent) for pid, parent in parents.items()}
    assert _with_descendants({7}, living) == {7, 2, 3, 5}
