"""Counts what the kernel's OOM killer did while the job ran: two counters, read at the start and at the end.

The cgroup's counter is evidence: it counts kills inside this job's container or Slurm step. The machine's counter
includes all processes, so it only supports a suspicion. Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst
(memory.events, memory.events.local) and mm/vmstat.c.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CGROUP = "/sys/fs/cgroup"


class OomKills:
    """Kills by the OOM killer; None where the kernel doesn't tell.

    Args:
        group: In this process's cgroup and below.
        machine: On the whole machine.
    """

    __slots__ = ("group", "machine")

    def __init__(self, group: int | None = None, machine: int | None = None) -> None:
        self.group = group
        self.machine = machine

    def since(self, before: OomKills) -> OomKills:
        """Return the kills between an earlier reading and this one.

        Returns:
            The difference; None where either reading is.
        """
        return OomKills(_difference(self.group, before.group), _difference(self.machine, before.machine))


def read_oom_kills(read: Callable[[str], str] | None = None) -> OomKills:
    """Read the counters of the OOM killer."""
    read = read or _read
    return OomKills(_group_kills(read), _counter(read, "/proc/vmstat"))


def _group_kills(read: Callable[[str], str]) -> int | None:
    try:
        groups = read("/proc/self/cgroup").splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in groups if line.startswith("0::")), None)
    if path is None:
        return None
    # In a container the path may name the host's tree while the mount shows the container's own root.
    for directory in (f"{_CGROUP}{path.rstrip('/')}", _CGROUP):
        kills = _counter(read, f"{directory}/memory.events")
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
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)
