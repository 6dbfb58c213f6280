"""How many CPUs this process may use.

torch counts the affinity mask only. In a container with a CPU limit that is the whole machine, and a worker for each of
its CPUs then shares the limit with all the others. So the limit of the control group counts too, in both versions.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = "/"


def cpu_count(*, root: str = ROOT) -> int:
    """Count the CPUs that this process may use: affinity and control group limit.

    Args:
        root: Root of the file system.

    Returns:
        At least 1; a limit of one and a half CPUs counts as 2.
    """
    limit = cgroup_limit(root=root)
    available = len(available_cpus())
    return available if limit is None else max(1, min(available, _round_up(limit)))


def core_count(*, root: str = ROOT) -> int:
    """Count the cores whose time this process gets in full: two hardware threads of a core are one.

    Args:
        root: Root of the file system.

    Returns:
        At least 1; a limit of one and a half CPUs counts as 1, since a second thread would wait for the first one.
    """
    path = os.path.join(root, "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list")
    cores = len({read_text(path.format(cpu)) or str(cpu) for cpu in available_cpus()})
    limit = cgroup_limit(root=root)
    return cores if limit is None else max(1, min(cores, int(limit)))


def available_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cgroup_limit(*, root: str = ROOT) -> float | None:
    """Find the control groups' limit.

    Args:
        root: Root of the file system.

    Returns:
        How many CPUs' time per second this process gets, or None where there is no limit.
    """
    limits = [limit for entry in cgroup_entries(root) if (limit := _entry_limit(root, *entry)) is not None]
    return min(limits, default=None)


def _round_up(number: float) -> int:
    return -int(-number // 1)


def cgroup_entries(root: str) -> Iterator[tuple[str, str]]:
    """Yield the controllers (none for version 2) and the path of each control group that this process is in."""
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            yield controllers, path


def _entry_limit(root: str, controllers: str, path: str) -> float | None:
    if not controllers:
        return lowest_limit(os.path.join(root, "sys/fs/cgroup"), path, _version_2_limit)
    if "cpu" not in controllers.split(","):
        return None
    mounts = (os.path.join(root, "sys/fs/cgroup", name) for name in ("cpu", controllers))
    mount = next((mount for mount in mounts if os.path.isdir(mount)), "")
    return lowest_limit(mount, path, _version_1_limit) if mount else None


def lowest_limit(mount: str, path: str, read_limit: Callable[[str], float | None]) -> float | None:
    """Return the lowest limit of a group and all those above it.

    In a container the path may be the host's and not exist; then only the existing groups count.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = (os.path.join(mount, *parts[:depth]) for depth in range(len(parts) + 1))
    return min((limit for group in groups if (limit := read_limit(group)) is not None), default=None)


def _version_2_limit(group: str) -> float | None:
    quota, _, period = read_text(os.path.join(group, "cpu.max")).strip().partition(" ")
    return _ratio(quota, period)


def _version_1_limit(group: str) -> float | None:
    quota = read_text(os.path.join(group, "cpu.cfs_quota_us"))
    return _ratio(quota.strip(), read_text(os.path.join(group, "cpu.cfs_period_us")).strip())


def _ratio(quota: str, period: str) -> float | None:
    """Divide two numbers in text; no limit is "max" in version 2, -1 in version 1, and a missing file."""
    if not (quota.isdecimal() and period.isdecimal()) or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def list_names(directory: str) -> list[str]:
    """Return the names in a directory, or none if it can't be read."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def read_text(path: str) -> str:
    """Return a file's text, or nothing if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
