"""Limits of the control groups that this process is in (v1 and v2): a container's CPU, memory and processes."""

from __future__ import annotations

import os

from elastic_run.cluster.limits import available_cpus, cgroup_limit, read_text
from elastic_run.diagnosis.doctor.finding import problem, warning
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_MIB = 1 << 20
_LEAST_MEMORY = 1024 * _MIB
_LEAST_PROCESSES = 256
#: No limit, as version 1 writes it: the largest number of pages.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The resources that this process has left under all its control groups.

    Attributes:
        cpus: Limit of CPU time per second, or None.
        available: CPUs in the process's mask.
        memory: Bytes of memory in all, or None.
        memory_left: Bytes that are not used yet, or None.
        processes_left: Processes and threads that may be started, or None.
        kills: How often the kernel has killed a process of the group for want of memory.
    """

    cpus: float | None = None
    available: int = 1
    memory: int | None = None
    memory_left: int | None = None
    processes_left: int | None = None
    kills: int = 0


def check(subject: Subject) -> list[Finding]:
    """Read the limits."""
    memory, processes, kills = [], [], 0
    for version, group in _find_groups(subject, "memory"):
        names = ("memory.max", "memory.current") if version > 1 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        memory += _read_pair(group, *names)
        kills = max(kills, _read_kills(group, "memory.events" if version > 1 else "memory.oom_control"))
    for _, group in _find_groups(subject, "pids"):
        processes += _read_pair(group, "pids.max", "pids.current")
    return judge(
        GroupLimits(
            cpus=cgroup_limit(root=subject.root),
            available=len(available_cpus()),
            memory=min((limit for limit, _ in memory), default=None),
            memory_left=min((limit - used for limit, used in memory), default=None),
            processes_left=min((limit - used for limit, used in processes), default=None),
            kills=kills,
        )
    )


def judge(limits: GroupLimits) -> list[Finding]:
    """Return which limits are too low."""
    found = []
    if limits.cpus is not None and limits.cpus < 1:
        what = f"this container may use {limits.cpus:g} CPUs of {limits.available}: workers are stopped again and again"
        remedy = "raise the CPU limit: docker --cpus, resources.limits.cpu of the pod, srun --cpus-per-task"
        found.append(problem(what, "cpu.max of the control group", remedy))
    if limits.memory_left is not None and limits.memory is not None and limits.memory_left < _LEAST_MEMORY:
        what = f"only {limits.memory_left // _MIB} MiB of memory are left: the kernel kills workers without a message"
        remedy = "raise the memory limit: docker --memory, resources.limits.memory of the pod, sbatch --mem"
        found.append(problem(what, f"memory.max of the control group is {limits.memory // _MIB} MiB", remedy))
    if limits.processes_left is not None and limits.processes_left < _LEAST_PROCESSES:
        what = f"only {max(0, limits.processes_left)} more processes or threads may be started"
        remedy = "raise the limit: docker --pids-limit, podPidsLimit of the kubelet, TasksMax of systemd"
        found.append(problem(what, "pids.max of the control group", remedy))
    if limits.kills:
        what = f"the kernel has killed {limits.kills} processes of this container because its memory was full"
        remedy = "raise the memory limit, or use fewer DataLoader workers (dmesg names the processes)"
        found.append(warning(what, "oom_kill in memory.events", remedy))
    return found


def _find_groups(subject: Subject, controller: str) -> Iterator[tuple[int, str]]:
    """Yield the version and the directory of each control group that limits this process, those above it included."""
    mount = subject.path("sys/fs/cgroup")
    for line in read_text(subject.path("proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or (controllers and controller not in controllers.split(",")):
            continue
        top = os.path.join(mount, controller) if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield 1 if controllers else 2, os.path.join(top, *parts[:depth])


def _read_pair(group: str, limit: str, used: str) -> list[tuple[int, int]]:
    """Return a limit and the used part of it; nothing if there is no limit."""
    most, current = (read_text(os.path.join(group, name)).strip() for name in (limit, used))
    if not (most.isdecimal() and current.isdecimal()) or int(most) >= _NO_LIMIT:
        return []
    return [(int(most), int(current))]


def _read_kills(group: str, name: str) -> int:
    rows = (line.split() for line in read_text(os.path.join(group, name)).splitlines())
    return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == "oom_kill" and row[1].isdecimal()), 0)
