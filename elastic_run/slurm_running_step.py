"""The step of Slurm in which this process runs, as the kernel shows it. Variables may be another process's.

Slurm's daemon `slurmstepd` starts the tasks of each step, and stays above them. Two things name its step:

- Its title, ``slurmstepd: [41.0]`` (src/slurmd/slurmstepd/slurmstepd.c, `_set_job_log_prefix`). In place of a number,
  the step may be batch, extern or interactive (src/common/log.c, `log_build_step_id_str`). A component of a step of a
  heterogeneous job has its own job, and a suffix: ``[42.0+1]``. The daemon that also manages steps adds `` stepmgr``.
- The control group of its tasks, which they keep where they outlive the process above them:
  ``/slurm/uid_0/job_41/step_0`` (src/plugins/cgroup/v1/xcgroup.c, `xcgroup_create_hierarchy`), and
  ``/system.slice/slurmstepd.scope/job_41/step_0/user/task_0`` (src/plugins/cgroup/v2/cgroup_v2.c,
  `cgroup_p_step_create`). Newer releases have the job's SLUID (SLURM_JOB_SLUID) in place of job_41, unless
  CgroupJobIdPaths is yes.

Without both, this process runs in no step, if it would see the daemon. It would not in a container with processes of
its own, in a container that a daemon of Docker or Podman has started, and where /proc hides other users' processes
(hidepid). A task that leaves its parent on a cluster without control groups (proctrack/linuxproc) is no longer seen to
be in its step.
"""

from __future__ import annotations

import os

__all__ = ["BATCH_STEP_ID", "STEP_VARIABLES", "read_running_step"]

#: SLURM_STEP_ID in a batch script (SLURM_BATCH_SCRIPT of slurm.h), which releases before Slurm 26.05 do not set there.
BATCH_STEP_ID = "-5"
#: Variables of the tasks of a step. A batch script has none of them; since Slurm 26.05 it has the first one.
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_DAEMON = "slurmstepd"
#: The kernel's number of the first namespace of processes, that of the host: PROC_PID_INIT_INO of linux/proc_ns.h.
_HOST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
#: Files in containers whose processes are started by a daemon, and so are not below the process that asked for them.
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def read_running_step(proc: str = "/proc") -> str | None:
    """Find the step in which this process runs.

    Args:
        proc: The directory with the kernel's files on processes.

    Returns:
        The step, such as ``41.0`` or ``41.batch``; "" if this process is seen to run in none; None if nothing shows it.
    """
    try:
        title = _find_daemon(proc)
    except OSError:  # a process has ended, or /proc hides those of others
        title = None
    if title:
        return title.partition("[")[2].partition("]")[0].partition(" ")[0] or None
    try:
        step = _find_group(proc)
        is_seen = title is not None and os.readlink(f"{proc}/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        return None
    return step or ("" if is_seen and not any(map(os.path.exists, _CONTAINER_MARKS)) else None)


def _find_daemon(proc: str) -> str:
    """Return the title of Slurm's daemon among the processes above this one, or ""."""
    pid = _read_parent(proc, "self")
    while pid > 1:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            title = file.read(100).decode(errors="replace").partition("\0")[0]
        if os.path.basename(title.partition(":")[0]) == _DAEMON:
            return title
        pid = _read_parent(proc, pid)
    return ""


def _read_parent(proc: str, pid: int | str) -> int:
    with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _find_group(proc: str) -> str:
    """Return the step that a control group of this process names, or ""."""
    with open(f"{proc}/self/cgroup", encoding="utf-8", errors="replace") as file:
        paths = [line.rstrip("\n").split("/") for line in file if "slurm" in line]
    for path in paths:
        place = next((place for place, name in enumerate(path) if name.startswith("step_")), 0)
        if place:
            return f"{path[place - 1].removeprefix('job_')}.{path[place].removeprefix('step_')}"
    return ""
