"""What this process may use of the machine, and what the kernel took back: CPUs, memory, kills of the OOM killer.

torch counts the affinity mask only. In a container with a CPU limit that is the whole machine, and a worker for each of
its CPUs then shares the limit with all the others. So the limits of the control groups count too, in both versions.
Every function takes the root of the file system as an argument, so that tests can show it other machines.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst (memory.events), cgroup-v1/memory.rst (memory.oom_control,
which counts the group alone, without those below it), mm/vmstat.c, ABI/testing/dev-kmsg and include/linux/proc_ns.h.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elastic_run.core.failure.root_cause import OomKills

ROOT = "/"
#: No memory limit, as version 1 writes it: the largest number of pages.
_NO_LIMIT = 1 << 60
_LOG = "/dev/kmsg"
#: Bytes of the longest record, and records that are read at most: some 0.1 s.
_RECORD = 8192
_MOST_RECORDS = 100_000
_FIRST_NAMESPACE = "pid:[4026531836]"
#: Seconds that the log's clock and ours may differ by.
_SLACK = 5.0


def cpu_count(*, root: str = ROOT) -> int:
    """Count the CPUs that this process may use, at least 1; a limit of one and a half CPUs counts as 2."""
    limit = cgroup_limit(root=root)
    available = len(available_cpus())
    return available if limit is None else max(1, min(available, -int(-limit // 1)))


def core_count(*, root: str = ROOT) -> int:
    """Count the cores whose time this process gets in full, at least 1: two hardware threads of a core are one.

    A limit of one and a half CPUs counts as 1, since a second thread would wait for the first one.
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
    """Return how many CPUs' time per second the control groups give this process, or None where there is no limit."""
    return _find_lowest("cpu", _read_cpu_limit, root)


def memory_limit(*, root: str = ROOT) -> int | None:
    """Return the bytes of memory that this process and its group may use, or None if there is no limit."""
    limit = _find_lowest("memory", lambda group: _read_limit(group, *_MEMORY_LIMITS), root)
    return None if limit is None else int(limit)


def available_memory(*, root: str = ROOT) -> int:
    """Return the bytes of memory that the machine and the control groups of this process leave to it."""
    facts = read_text(os.path.join(root, "proc/meminfo")).partition("MemAvailable:")[2].split()
    of_machine = int(facts[0]) * 1024 if facts else _NO_LIMIT
    left = _find_lowest("memory", lambda group: _read_left(group, _MEMORY_LIMITS, _MEMORY_USES), root)
    return of_machine if left is None else int(min(left, of_machine))


def available_processes(*, root: str = ROOT) -> int | None:
    """Return how many processes and threads the control groups allow beside those that run; None for no limit."""
    left = _find_lowest("pids", lambda group: _read_left(group, ("pids.max",), ("pids.current",)), root)
    return None if left is None else int(left)


def read_oom_kills(*, root: str = ROOT) -> OomKills:
    """Read the counters of the OOM killer, of this process's control group and of the machine.

    The group's counter is evidence: it counts kills inside this job's container or Slurm step. The machine's counter
    includes all processes, so it only supports a suspicion.
    """
    from elastic_run.core.failure.root_cause import OomKills

    # In a container the path may name the host's tree while the mount shows the container's own root.
    groups = (group for tree in _group_trees("memory", root) for group in (tree[-1], tree[0]))
    files = (os.path.join(group, name) for group in groups for name in ("memory.events", "memory.oom_control"))
    counters = (kills for file in files if (kills := _read_counter(file)) is not None)
    return OomKills(next(counters, None), _read_counter(os.path.join(root, "proc/vmstat")))


def _read_counter(path: str) -> int | None:
    lines = read_text(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


# --- control groups --------------------------------------------------------------------------------------------------
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USES = ("memory.current", "memory.usage_in_bytes")


def _group_trees(controller: str, root: str) -> Iterator[list[str]]:
    """Yield the directories of a control group that this process is in and of all those above it, the top first.

    In a container the path may be the host's and not exist; then only the existing groups count.
    """
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        controllers, colon, path = line.partition(":")[2].partition(":")
        if not colon or (controllers and controller not in controllers.split(",")):
            continue
        # Version 2 has no controllers here. Version 1 mounts those of one tree under one name or under all.
        trees = (os.path.join(mount, name) for name in (controller, controllers)) if controllers else (mount,)
        if tree := next(filter(os.path.isdir, trees), ""):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            yield [os.path.join(tree, *parts[:depth]) for depth in range(len(parts) + 1)]


def read_throttled(*, root: str = ROOT) -> float:
    """Return the seconds for which a quota has held up this process's control group, or one above it; 0 if unknown."""
    found = [0.0]
    for group in (group for tree in _group_trees("cpu", root) for group in tree):
        facts = dict(line.split() for line in read_text(os.path.join(group, "cpu.stat")).splitlines())
        found += [int(facts.get("throttled_usec", 0)) / 1e6, int(facts.get("throttled_time", 0)) / 1e9]
    return max(found)


def _find_lowest(controller: str, read: Callable[[str], float | None], root: str) -> float | None:
    """Return the lowest value of the groups of this process and of all those above them; they limit it, too."""
    groups = (group for tree in _group_trees(controller, root) for group in tree)
    return min((value for group in groups if (value := read(group)) is not None), default=None)


def _read_cpu_limit(group: str) -> float | None:
    """Read quota and period; no limit is "max" in version 2, -1 in version 1, and a missing file."""
    quota, _, period = read_text(os.path.join(group, "cpu.max")).strip().partition(" ")
    if not quota:
        quota = read_text(os.path.join(group, "cpu.cfs_quota_us")).strip()
        period = read_text(os.path.join(group, "cpu.cfs_period_us")).strip()
    if not (quota.isdecimal() and period.isdecimal()) or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read_limit(group: str, *names: str) -> int | None:
    texts = (read_text(os.path.join(group, name)).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT), None)


def _read_left(group: str, limits: Sequence[str], uses: Sequence[str]) -> float | None:
    limit, used = _read_limit(group, *limits), _read_limit(group, *uses)
    return None if limit is None else max(0, limit - (used or 0))


# --- the kernel's log -------------------------------------------------------------------------------------------------


def read_kernel_log(seconds: float, path: str = _LOG) -> tuple[str, ...]:
    """Return the messages of the last seconds, the oldest first; none where the log may not be read."""
    # Most kernels stamp records with the clock that is not adjusted, some with the adjusted one.
    now = min(time.clock_gettime(time.CLOCK_MONOTONIC_RAW), time.monotonic())
    since = max(0.0, now - seconds - _SLACK) * 1e6
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        text = b"".join(_read_records(descriptor))
    finally:
        os.close(descriptor)
    return tuple(message for at, message in map(_parse, text.splitlines()) if at >= since)


def has_first_pids() -> bool:
    """Whether this process's pids are those that the kernel writes: not so in most containers."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def _read_records(descriptor: int) -> list[bytes]:
    records: list[bytes] = []
    while len(records) < _MOST_RECORDS:
        try:
            record = os.read(descriptor, _RECORD)
        except BrokenPipeError:
            continue  # records were overwritten meanwhile; the next one is the oldest that is left
        except OSError:
            break
        if not record:
            break
        records.append(record)
    return records


def _parse(line: bytes) -> tuple[float, str]:
    """Return the microseconds since boot and the message of `6,242,340620,-;message`; of a dictionary's line -1."""
    head, _, message = line.partition(b";")
    match head.split(b","):
        case [_priority, _number, at, _flags, *_] if at.isdigit():
            return float(at), message.decode(errors="replace")
    return -1.0, ""


# --- files of the kernel ---------------------------------------------------------------------------------------------


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
