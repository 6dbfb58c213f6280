"""Slurm's variables and processes as data: node lists, the port of a step, the step in which this process runs.

Both the launcher (`schedulers.slurm`) and training scripts (`worker.place`) need them, so this module imports nothing
of ours.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: SLURM_STEP_ID in a batch script (SLURM_BATCH_SCRIPT of slurm.h), which releases before Slurm 26.05 do not set there.
BATCH_STEP_ID = "-5"
#: Variables of the tasks of a step. A batch script has none of them; since Slurm 26.05 it has the first one.
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
#: More than any cluster has, so that a broken list can't fill the memory.
_MOST_NODES = 1 << 20
#: Ports for the steps of Slurm jobs: below those that Linux gives to outgoing connections (from 32768).
_FIRST_PORT, _PORTS = 10_000, 20_000
#: Ports between one job and the next: jobs of neighbouring numbers share nodes, and each has several steps.
_PORTS_OF_A_JOB = 97
_HIGHEST_PORT = 65535
_DAEMON = "slurmstepd"
#: The kernel's number of the first namespace of processes, that of the host: PROC_PID_INIT_INO of linux/proc_ns.h.
_HOST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
#: Files in containers whose processes are started by a daemon, and so are not below the process that asked for them.
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


# --- node lists ------------------------------------------------------------------------------------------------------
# scontrol is often missing inside a container, and costs a process per worker where it isn't. The grammar: names are
# separated by commas; a name is text with any number of brackets in it; a bracket holds numbers and ranges of numbers.
# A range keeps the leading zeros of its first number.


def parse_nodelist(text: str) -> tuple[str, ...]:
    """Return the nodes that SLURM_STEP_NODELIST or SLURM_JOB_NODELIST names, in its order; at least one."""
    import re

    nodes: list[str] = []
    for name in re.split(r",(?![^\[\]]*\])", text.strip()):  # at the commas outside of brackets
        pieces = re.findall(r"\[[^\[\]]*\]|[^\[\],\s]+", name)
        if not name or "".join(pieces) != name:
            raise _refusal(text, f"{name!r} is not a name")
        nodes += _expand(pieces, text)
    if len(nodes) > _MOST_NODES:
        raise _refusal(text, f"more than {_MOST_NODES} nodes")
    return tuple(nodes)


def count_tasks(text: str, node: int) -> int:
    """Return how many tasks of a Slurm step run on one of its nodes.

    `text` is the value of SLURM_STEP_TASKS_PER_NODE, such as ``2(x3),1``: three nodes with two tasks, one with one.
    """
    import re

    left = node
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip(), re.ASCII)
        if match is None:
            break
        repeats = int(match[2] or 1)
        if left < repeats:
            return int(match[1])
        left -= repeats
    message = f"SLURM_STEP_TASKS_PER_NODE={text!r} says nothing of node {node}"
    raise ValueError(message)


def _expand(pieces: list[str], text: str) -> list[str]:
    """Return the nodes of a name of texts and brackets.

    Of several brackets the last one counts fastest, and the others from the first on: so does Slurm 22.05, whose
    scontrol a test asks. Text behind the last bracket, which Slurm never writes, is taken as well.
    """
    import itertools
    import math

    brackets = [place for place, piece in enumerate(pieces) if piece.startswith("[")]
    values = [_expand_bracket(piece[1:-1], text) if piece.startswith("[") else [piece] for piece in pieces]
    if math.prod(map(len, values)) > _MOST_NODES:
        raise _refusal(text, f"more than {_MOST_NODES} nodes")
    order = [*reversed(brackets[:-1]), *brackets[-1:]]  # the slowest first
    names = []
    for chosen in itertools.product(*(values[place] for place in order)):
        by_place = dict(zip(order, chosen, strict=True))
        names.append("".join(by_place.get(place, piece) for place, piece in enumerate(pieces)))
    return names


def _expand_bracket(inner: str, text: str) -> list[str]:
    import re

    numbers = []
    for item in inner.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item, re.ASCII)
        if match is None:
            raise _refusal(text, f"{item!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _refusal(text, f"the range {item} goes down")
        if int(last) - int(first) >= _MOST_NODES:
            raise _refusal(text, f"more than {_MOST_NODES} nodes")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _refusal(text: str, reason: str) -> ValueError:
    return ValueError(f"{text!r} is no Slurm node list, like a[01-03,7],b: {reason}")


# --- the port of a step ----------------------------------------------------------------------------------------------


def step_port(job: int, step: int) -> int:
    """Return the port for a step of a Slurm job: the same in all its tasks, another one in its neighbours.

    Steps of one job differ up to 97 of them, and so do the next 200 jobs, with 97 steps each.
    """
    return _FIRST_PORT + (job * _PORTS_OF_A_JOB + step) % _PORTS


def find_port(environ: Mapping[str, str]) -> int:
    """Return the port for the step of this process: the first of `srun --resv-ports`, else one by job and step."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")
    if reserved and reserved != "(null)":
        first = reserved.partition(",")[0].partition("-")[0]
        if first.isdecimal() and 0 < int(first) <= _HIGHEST_PORT:
            return int(first)
        message = f"SLURM_STEP_RESV_PORTS: {reserved!r} does not begin with a port from 1 to {_HIGHEST_PORT}"
        raise ValueError(message)
    return step_port(int(environ.get("SLURM_JOB_ID") or 0), int(environ.get("SLURM_STEP_ID") or 0))


# --- the step in which this process runs, as the kernel shows it -----------------------------------------------------
# Variables may be another process's. Slurm's daemon `slurmstepd` starts the tasks of each step, and stays above them.
# Two things name its step:
#
# - Its title, ``slurmstepd: [41.0]`` (src/slurmd/slurmstepd/slurmstepd.c, `_set_job_log_prefix`). In place of a number,
#   the step may be batch, extern or interactive (src/common/log.c, `log_build_step_id_str`). A component of a step of a
#   heterogeneous job has its own job, and a suffix: ``[42.0+1]``. The daemon that also manages steps adds `` stepmgr``.
# - The control group of its tasks, which they keep where they outlive the process above them:
#   ``/slurm/uid_0/job_41/step_0`` (src/plugins/cgroup/v1/xcgroup.c, `xcgroup_create_hierarchy`), and
#   ``/system.slice/slurmstepd.scope/job_41/step_0/user/task_0`` (src/plugins/cgroup/v2/cgroup_v2.c,
#   `cgroup_p_step_create`). Newer releases have the job's SLUID (SLURM_JOB_SLUID) in place of job_41, unless
#   CgroupJobIdPaths is yes.
#
# Without both, this process runs in no step, if it would see the daemon. It would not in a container with processes of
# its own, in a container that a daemon of Docker or Podman has started, and where /proc hides other users' processes.


def read_running_step(proc: str = "/proc") -> str | None:
    """Return the step in which this process runs, such as ``41.0`` or ``41.batch``.

    It is "" if this process is seen to run in none, and None if nothing shows it.
    """
    try:
        title = _read_daemon_title(proc)
    except OSError:  # a process has ended, or /proc hides those of others
        title = None
    if title:
        return title.partition("[")[2].partition("]")[0].partition(" ")[0] or None
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8", errors="replace") as file:
            paths = [line.rstrip("\n").split("/") for line in file if "slurm" in line]
        is_seen = title is not None and os.readlink(f"{proc}/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        return None
    for path in paths:
        place = next((place for place, name in enumerate(path) if name.startswith("step_")), 0)
        if place:
            return f"{path[place - 1].removeprefix('job_')}.{path[place].removeprefix('step_')}"
    return "" if is_seen and not any(map(os.path.exists, _CONTAINER_MARKS)) else None


def _read_daemon_title(proc: str) -> str:
    """Return the title of Slurm's daemon among the processes above this one, or ""."""
    pid: int | str = "self"
    while True:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        if pid <= 1:
            return ""
        with open(f"{proc}/{pid}/cmdline", "rb") as command:
            title = command.read(100).decode(errors="replace").partition("\0")[0]
        if os.path.basename(title.partition(":")[0]) == _DAEMON:
            return title
