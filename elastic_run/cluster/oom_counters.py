"""The counters of the kernel's OOM killer: of this process's control group, and of the machine.

The cgroup's counter is evidence: it counts kills inside this job's container or Slurm step. The machine's counter
includes all processes, so it only supports a suspicion. Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst
(memory.events, memory.events.local), cgroup-v1/memory.rst (memory.oom_control, which counts the group alone, without
those below it) and mm/vmstat.c.
"""

from __future__ import annotations

import os

from elastic_run.cluster.cpus import ROOT, cgroup_entries, read_text
from elastic_run.core.failure.root_cause import OomKills


def read_oom_kills(*, root: str = ROOT) -> OomKills:
    """Read the counters of the OOM killer.

    Args:
        root: Directory that stands for `/`.
    """
    return OomKills(_group_kills(root), _counter(os.path.join(root, "proc/vmstat")))


def _group_kills(root: str) -> int | None:
    for controllers, path in cgroup_entries(root):
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, file = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
        # In a container the path may name the host's tree while the mount shows the container's own root.
        for group in (path.strip("/"), ""):
            kills = _counter(os.path.join(root, "sys/fs/cgroup", tree, group, file))
            if kills is not None:
                return kills
    return None


def _counter(path: str) -> int | None:
    for line in read_text(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None
