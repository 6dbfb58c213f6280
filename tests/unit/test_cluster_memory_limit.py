"""The memory limit of the control groups, of both versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster.memory_limit import memory_limit

if TYPE_CHECKING:
    from pathlib import Path

_V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step", {"sys/fs/cgroup/job/memory.max": "7000", "sys/fs/cgroup/job/step/memory.max": "max"}, 7000),
        ("0::/job", {"sys/fs/cgroup/memory.max": "max"}, None),
        ("4:memory:/job", {f"{_V1}/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:memory:/job\n0::/", {f"{_V1}/job/memory.limit_in_bytes": "5", f"{_V1}/memory.limit_in_bytes": "9"}, 5),
        ("3:cpu:/job", {f"{_V1}/job/memory.limit_in_bytes": "5"}, None),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], limit: int | None) -> None:
    """Of the group and all those above it; the largest number, and no file, are no limit."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    assert memory_limit(root=str(tmp_path)) == limit
