"""Limits of this process (ulimit): open files, processes, locked memory. Workers inherit them."""

from __future__ import annotations

import os
import resource

import psutil

from elastic_run.cluster.limits import read_text
from elastic_run.diagnosis.doctor.finding import problem, warning
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_LEAST_FILES = 1024
_LEAST_PROCESSES = 512
#: Bytes that a verbs library registers for one connection, roughly; below that it can't start.
_LEAST_LOCKED = 64 << 20
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process.

    Attributes:
        files: Open files.
        most_files: The hard limit of open files.
        processes: Processes and threads of this user; -1 for a user whom the kernel does not limit.
        running: Processes and threads that the user has.
        locked: Bytes of locked memory.
        core: Bytes of a core file.
        core_pattern: Where the kernel writes core files to.
        has_infiniband: Whether this machine has an InfiniBand device, or one like it.
    """

    files: int = _UNLIMITED
    most_files: int = _UNLIMITED
    processes: int = _UNLIMITED
    running: int = 0
    locked: int = _UNLIMITED
    core: int = 0
    core_pattern: str = "core"
    has_infiniband: bool = False


def check(subject: Subject) -> list[Finding]:
    """Read the limits."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = _UNLIMITED if os.getuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    devices = subject.path("sys/class/infiniband")
    return judge(
        Limits(
            files=files,
            most_files=most_files,
            processes=processes,
            running=0 if processes == _UNLIMITED else _count_running(),
            locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            core=resource.getrlimit(resource.RLIMIT_CORE)[0],
            core_pattern=read_text(subject.path("proc/sys/kernel/core_pattern")).strip(),
            has_infiniband=os.path.isdir(devices) and bool(os.listdir(devices)),
        )
    )


def judge(limits: Limits) -> list[Finding]:
    """Return which limits are too low, or too high."""
    found = []
    if limits.files != _UNLIMITED and limits.files < _LEAST_FILES:
        raised = "unlimited" if limits.most_files == _UNLIMITED else str(limits.most_files)
        what = f"only {limits.files} open files are allowed: jobs die of 'Too many open files'"
        command = f"ulimit -n {raised}"
        if limits.most_files == limits.files:
            command = f"raise the hard limit to {_LEAST_FILES} or more (root: ulimit -n, /etc/security/limits.conf)"
        remedy = f"{command}; in Slurm sbatch --propagate=NONE, in systemd LimitNOFILE="
        found.append(problem(what, f"the hard limit is {raised}", remedy))
    if limits.processes != _UNLIMITED and limits.processes - limits.running < _LEAST_PROCESSES:
        what = f"only {max(0, limits.processes - limits.running)} more processes or threads are allowed"
        evidence = f"the limit is {limits.processes}, and this user has {limits.running}"
        found.append(problem(what, evidence, "ulimit -u unlimited, or end what runs needlessly (ps -u $USER -L)"))
    if limits.has_infiniband and limits.locked != _UNLIMITED and limits.locked < _LEAST_LOCKED:
        what = f"only {limits.locked >> 10} KiB of memory may be locked: NCCL can't use InfiniBand"
        remedy = "ulimit -l unlimited; in Slurm PropagateResourceLimitsExcept=MEMLOCK, in docker --ulimit memlock=-1"
        found.append(problem(what, "/sys/class/infiniband has devices", remedy))
    if limits.core == _UNLIMITED and not limits.core_pattern.startswith("|"):
        what = "core files have no limit: each crashed worker writes its whole memory to a disk"
        found.append(warning(what, f"kernel.core_pattern is {limits.core_pattern!r}", "ulimit -c 0"))
    return found


def _count_running() -> int:
    """Count this user's threads."""
    found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    try:
        return sum(each["num_threads"] or 0 for each in found if each["uids"] and each["uids"].real == os.getuid())
    except OSError:
        return 0  # no file can be opened
