"""Counts the kills of the kernel's OOM killer while the job ran: two counters, read at the start and at the end.

The cgroup's counter is evidence: it counts kills inside this job's container or Slurm step. The machine's counter
includes all processes, so it only supports a suspicion. Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst
(memory.events, memory.events.local), cgroup-v1/memory.rst (memory.oom_control, which counts the group alone, without
those below it) and mm/vmstat.c.
"""

from __future__ import annotations

from elastic_run.core.failure.oom_kills import OomKills

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CGROUP = "/sys/fs/cgroup"


def read_oom_kills(read: Callable[[str], str] | None = None) -> OomKills:
    """Read the counters of the OOM killer."""
    read = read or _read
    return OomKills(_group_kills(read), _counter(read, "/proc/vmstat"))


def _group_kills(read: Callable[[str], str]) -> int | None:
    try:
        groups = read("/proc/self/cgroup").splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, file = (f"{_CGROUP}/memory", "memory.oom_control") if controllers else (_CGROUP, "memory.events")
        # In a container the path may name the host's tree while the mount shows the container's own root.
        for directory in (f"{tree}{path.rstrip('/')}", tree):
            kills = _counter(read, f"{directory}/{file}")
            if kills is not None:
                return kills
    return None


def _counter(read: Callable[[str], str], path: str) -> int | None:
    try:
        text = read(path)
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
