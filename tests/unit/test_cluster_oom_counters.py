"""The OOM killer's counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster.oom_counters import read_oom_kills
from elastic_run.core.failure.root_cause import OomKills

if TYPE_CHECKING:
    from pathlib import Path

VMSTAT = {"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}
EVENTS = "low 0\noom 3\noom_kill 2\n"
CONTROL = {"sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}


@pytest.mark.parametrize(
    ("files", "group", "machine"),
    [
        ({}, None, None),
        (VMSTAT, None, 7),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": EVENTS}, 2, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS, **VMSTAT}, 2, 7),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.events": EVENTS}, 2, None),
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        ({"proc/self/cgroup": "4:memory:/job\n"}, None, None),
        ({"proc/self/cgroup": "3:cpu:/\n4:memory:/job\n0::/\n", **CONTROL}, 2, None),
        ({"proc/self/cgroup": "garbage\n"}, None, None),
        ({"proc/vmstat": "nr_free_pages 1\n"}, None, None),
    ],
)
def test_counters_are_read_where_the_kernel_has_them(
    tmp_path: Path, files: dict[str, str], group: int | None, machine: int | None
) -> None:
    """Control groups of both versions, in a container or not, and the machine's counter."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    kills = read_oom_kills(root=str(tmp_path))
    assert (kills.group, kills.machine) == (group, machine)


def test_the_difference_of_two_readings_counts() -> None:
    """Kills before the job are not the job's."""
    difference = OomKills(5, 9).since(OomKills(3, None))
    assert (difference.group, difference.machine) == (2, None)
    assert OomKills(1, 1).since(OomKills(2, 1)).group == 0


def test_the_real_files_are_read_without_complaint() -> None:
    """Whatever this machine has, reading it never raises."""
    kills = read_oom_kills()
    assert kills.machine is None or kills.machine >= 0
