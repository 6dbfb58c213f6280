"""What this process may use: CPUs, cores and memory by affinity and control groups, and the OOM killer's counters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster import limits
from elastic_run.cluster.limits import memory_limit, read_oom_kills
from elastic_run.core.failure.root_cause import OomKills

if TYPE_CHECKING:
    from pathlib import Path


def write_tree(root: Path, files: dict[str, str]) -> str:
    """Write files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(root)


GROUPS = "proc/self/cgroup"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"

LIMITS: list[tuple[str, dict[str, str], float | None]] = [
    ("no control groups", {}, None),
    ("v2 without a limit", {GROUPS: "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
    ("v2 in a container", {GROUPS: "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
    ("v2 below", {GROUPS: "0::/a/b\n", f"{V2}/a/b/cpu.max": "400000 100000\n"}, 4.0),
    (
        "v2 limit of a parent is lower",
        {GROUPS: "0::/a/b\n", f"{V2}/a/cpu.max": "200000 100000\n", f"{V2}/a/b/cpu.max": "400000 100000\n"},
        2.0,
    ),
    ("v2 path outside of the container", {GROUPS: "0::/../../x\n", f"{V2}/cpu.max": "300000 100000\n"}, 3.0),
    ("v2 file is odd", {GROUPS: "0::/\n", f"{V2}/cpu.max": "what"}, None),
    (
        "v1",
        {GROUPS: "4:cpu,cpuacct:/j\n", f"{V1}/j/cpu.cfs_quota_us": "50000\n", f"{V1}/j/cpu.cfs_period_us": "100000"},
        0.5,
    ),
    (
        "v1 without a limit",
        {GROUPS: "4:cpu,cpuacct:/\n", f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000"},
        None,
    ),
    (
        "v1 in a container that shows the host's path",
        {
            GROUPS: "7:cpu,cpuacct:/docker/x\n3:memory:/m\n0::/\n",
            f"{V1}/cpu.cfs_quota_us": "200000\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        2.0,
    ),
    ("v1 controller is not mounted", {GROUPS: "4:cpu,cpuacct:/j\n"}, None),
    ("v1 other controllers", {GROUPS: "4:memory:/j\nnonsense\n"}, None),
]


@pytest.mark.parametrize(("files", "limit"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_the_lowest_limit_counts(files: dict[str, str], limit: float | None, tmp_path: Path) -> None:
    """The limit is the lowest of the group and all above it, in CPUs."""
    assert limits.cgroup_limit(root=write_tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [("50000", 8, 1), ("150000", 8, 2), ("200000", 8, 2), ("900000", 8, 8), ("max", 8, 8), ("800000", 3, 3)],
)
def test_the_count_is_the_lower_of_affinity_and_limit(
    quota: str, affinity: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a CPU counts as one, and there is always one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    root = write_tree(tmp_path, {GROUPS: "0::/\n", f"{V2}/cpu.max": f"{quota} 100000\n"})
    assert limits.cpu_count(root=root) == expected


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [("150000", 8, 1), ("300000", 8, 3), ("50000", 8, 1), ("max", 8, 4), ("max", 3, 2), ("max", 1, 1)],
)
def test_two_threads_of_a_core_count_once(
    quota: str, affinity: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores count once, and only those whose time the control group grants in full."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu & ~1}-{cpu | 1}\n" for cpu in range(8)
    }
    root = write_tree(tmp_path, {GROUPS: "0::/\n", f"{V2}/cpu.max": f"{quota} 100000\n", **siblings})
    assert limits.core_count(root=root) == expected


def test_without_affinity_all_cpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system without affinity masks every CPU may be used."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert len(limits.available_cpus()) == os.cpu_count()


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
def test_the_lowest_memory_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], limit: int | None) -> None:
    """Of the group and all those above it; the largest number, and no file, are no limit."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    assert memory_limit(root=str(tmp_path)) == limit


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


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/meminfo": "MemFree: 1 kB\nMemAvailable:    4000 kB\n"}, 4000 * 1024),
        ({"proc/meminfo": "MemAvailable: 4000 kB\n", GROUPS: "0::/\n", f"{V2}/memory.max": "max\n"}, 4000 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable: 4000 kB\n",
                GROUPS: "0::/a\n",
                f"{V2}/a/memory.max": "1000000\n",
                f"{V2}/a/memory.current": "400000\n",
            },
            600000,
        ),
    ],
)
def test_the_memory_that_is_left(files: dict[str, str], left: int, tmp_path: Path) -> None:
    """The machine and each control group leave some memory; the least counts."""
    assert limits.available_memory(root=write_tree(tmp_path, files)) == left
