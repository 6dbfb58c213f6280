"""The memory limit of the control groups that this process is in (v1 and v2)."""

from __future__ import annotations

import os

from elastic_run.cluster.cpus import ROOT, cgroup_entries, lowest_limit, read_text

#: No limit, as version 1 writes it: the largest number of pages.
_NO_LIMIT = 1 << 60


def memory_limit(*, root: str = ROOT) -> int | None:
    """Return the bytes of memory that this process and its group may use, or None if there is no limit.

    Args:
        root: Directory that stands for `/`.
    """
    limits = []
    for controllers, path in cgroup_entries(root):
        if not controllers:
            limits.append(lowest_limit(os.path.join(root, "sys/fs/cgroup"), path, _version_2_limit))
        elif "memory" in controllers.split(","):
            limits.append(lowest_limit(os.path.join(root, "sys/fs/cgroup/memory"), path, _version_1_limit))
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _version_2_limit(group: str) -> float | None:
    return _read(os.path.join(group, "memory.max"))


def _version_1_limit(group: str) -> float | None:
    return _read(os.path.join(group, "memory.limit_in_bytes"))


def _read(path: str) -> float | None:
    text = read_text(path).strip()
    return float(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
