"""The doctor's checks of this machine: its shared memory, limits, directories and GPUs.

nvidia-smi hangs with a sick driver, so it gets a deadline. It runs in a process of its own, which is killed then.
"""

from __future__ import annotations

import os
import resource
import subprocess

import psutil

from elastic_run.cluster.devices import torch_build
from elastic_run.cluster.limits import (
    available_cpus,
    available_memory,
    available_processes,
    cgroup_limit,
    list_names,
)
from elastic_run.diagnosis.doctor_report import problem, warning
from elastic_run.files import find_program
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.diagnosis.doctor_report import Finding, Subject

_MIB = 1 << 20


# --- memory and limits ------------------------------------------------------------------------------------------------
#: Bytes of /dev/shm: docker's default is 64 MiB, less than a few batches of images.
_LEAST_SHARED, _LEAST_SHARED_FREE = 128 * _MIB, 64 * _MIB
_LEAST_OPEN_FILES = 1024
#: Processes and threads that may be started, under the limit of the user and of the control group.
_LEAST_PROCESSES, _LEAST_GROUP_PROCESSES = 512, 256
#: Bytes that a verbs library registers for one connection, roughly; below that it can't start.
_LEAST_LOCKED = 64 * _MIB
_LEAST_MEMORY = 1024 * _MIB
_UNLIMITED = resource.RLIM_INFINITY


def check_shared_memory(subject: Subject) -> list[Finding]:
    """Check the size of /dev/shm: DataLoader workers pass batches through it, NCCL its buffers."""
    path = subject.path("dev/shm")
    try:
        place = psutil.disk_usage(path)
    except OSError as error:
        return [problem(f"{path} is missing", str(error), "mount -t tmpfs shm /dev/shm")]
    evidence = f"{place.total // _MIB} MiB, {place.free // _MIB} MiB of it free"
    dies = "DataLoader workers die there of 'Bus error', and NCCL of 'No space left'"
    if place.total < _LEAST_SHARED:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
        return [problem(f"{path} is small: {dies}", evidence, remedy)]
    if place.free < _LEAST_SHARED_FREE:
        return [problem(f"{path} is full: {dies}", evidence, f"remove what dead jobs left there: ls -la {path}")]
    return []


def check_limits(subject: Subject) -> list[Finding]:
    """Check the limits of this process (ulimit), which workers inherit."""
    found = []
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != _UNLIMITED and files < _LEAST_OPEN_FILES:
        raised = "unlimited" if most_files == _UNLIMITED else str(most_files)
        by_root = f"raise the hard limit to {_LEAST_OPEN_FILES} or more (root: ulimit -n, /etc/security/limits.conf)"
        command = by_root if most_files == files else f"ulimit -n {raised}"
        what = f"only {files} open files are allowed: jobs die of 'Too many open files'"
        remedy = f"{command}; in Slurm sbatch --propagate=NONE, in systemd LimitNOFILE="
        found.append(problem(what, f"the hard limit is {raised}", remedy))
    # The kernel does not limit root's processes.
    processes = _UNLIMITED if os.getuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    running = 0 if processes == _UNLIMITED else _count_running()
    if processes != _UNLIMITED and processes - running < _LEAST_PROCESSES:
        what = f"only {max(0, processes - running)} more processes or threads are allowed"
        evidence = f"the limit is {processes}, and this user has {running}"
        found.append(problem(what, evidence, "ulimit -u unlimited, or end what runs needlessly (ps -u $USER -L)"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_infiniband = bool(list_names(subject.path("sys/class/infiniband")))
    if has_infiniband and locked != _UNLIMITED and locked < _LEAST_LOCKED:
        what = f"only {locked >> 10} KiB of memory may be locked: NCCL can't use InfiniBand"
        remedy = "ulimit -l unlimited; in Slurm PropagateResourceLimitsExcept=MEMLOCK, in docker --ulimit memlock=-1"
        found.append(problem(what, "/sys/class/infiniband has devices", remedy))
    return found


def _count_running() -> int:
    """Count this user's threads."""
    found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    try:
        return sum(each["num_threads"] or 0 for each in found if each["uids"] and each["uids"].real == os.getuid())
    except OSError:
        return 0  # no file can be opened


def check_control_groups(subject: Subject) -> list[Finding]:
    """Check the limits of the control groups that this process is in (v1 and v2): a container's limits."""
    found: list[Finding] = []
    cpus = cgroup_limit(root=subject.root)
    if cpus is not None and cpus < 1:
        what = f"this container may use {cpus:g} CPUs of {len(available_cpus())}: workers are stopped again and again"
        remedy = "raise the CPU limit: docker --cpus, resources.limits.cpu of the pod, srun --cpus-per-task"
        found.append(problem(what, "cpu.max of the control group", remedy))
    left = available_memory(root=subject.root)
    if left < _LEAST_MEMORY:
        what = f"only {left // _MIB} MiB of memory are left: the kernel kills workers without a message"
        remedy = "raise the memory limit: docker --memory, resources.limits.memory of the pod, sbatch --mem"
        found.append(problem(what, "memory of the machine and its control groups", remedy))
    if left < subject.kept_bytes:
        what = f"--keep-state needs {subject.kept_bytes / 1e9:.1f} GB of memory, and {left / 1e9:.1f} GB are left"
        found.append(problem(what, "memory of the machine and its control groups", "keep less, or raise the limit"))
    processes = available_processes(root=subject.root)
    if processes is not None and processes < _LEAST_GROUP_PROCESSES:
        what = f"only {processes} more processes or threads may be started"
        remedy = "raise the limit: docker --pids-limit, podPidsLimit of the kubelet, TasksMax of systemd"
        found.append(problem(what, "pids.max of the control group", remedy))
    return found


# --- directories ------------------------------------------------------------------------------------------------------
_LEAST_FREE, _FEW_FREE = 64 * _MIB, 1024 * _MIB
_LEAST_FILES = 100
#: Bytes of the file that is written: more than a block, so that a full disk or a used-up quota refuses it.
_PROBE = bytes(1 << 16)
_OTHER_PLACE = "name another directory (--log-dir, TMPDIR)"


def check_directories(subject: Subject) -> list[Finding]:
    """Write a file into each directory that the job writes to, or into the nearest above it, and remove the file."""
    temporary = subject.environ.get("TMPDIR") or subject.path("tmp")
    places = dict.fromkeys(os.path.abspath(path) for path in (*subject.directories, temporary))
    return [found for place in places for found in _check_directory(place)]


def _check_directory(path: str) -> list[Finding]:
    place = path
    while not os.path.isdir(place) and not os.path.lexists(place):
        place = os.path.dirname(place)
    error = _write_probe(place)
    if error is not None:
        remedy = f"{_OTHER_PLACE}, or see why: ls -ld, df -h, mount, quota -s"
        return [problem(f"the directory {path} can't be written: {error.strerror}", "a file there was tried", remedy)]
    state = os.statvfs(place)
    free = state.f_bavail * state.f_frsize
    if state.f_files and state.f_favail < _LEAST_FILES:
        what = f"the file system of {path} is full: it has room for {state.f_favail} more files"
        return [problem(what, f"{free // _MIB} MiB are free", f"remove files: df -i {path} counts them")]
    if free >= _FEW_FREE:
        return []
    what = f"the file system of {path} is {'' if free < _LEAST_FREE else 'almost '}full"
    remedy = f"remove files there (du -x -d1 {path}), or {_OTHER_PLACE}"
    return [(problem if free < _LEAST_FREE else warning)(what, f"{free // _MIB} MiB are free", remedy)]


def _write_probe(place: str) -> OSError | None:
    name = os.path.join(place, f".elastic-run-{os.urandom(8).hex()}")
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error
    try:
        if os.write(descriptor, _PROBE) < len(_PROBE):
            os.write(descriptor, _PROBE)  # gives the reason
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
        os.unlink(name)
    return None


# --- GPUs -------------------------------------------------------------------------------------------------------------
_MASK = "CUDA_VISIBLE_DEVICES"
#: Seconds: it takes one or two on a healthy machine with eight GPUs that are not in persistence mode.
_SMI_TIMEOUT = 15.0
#: MiB that a GPU has in use without any process.
_IDLE_MEMORY = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as nvidia-smi knows it; memory in MiB."""

    index: int
    uuid: str
    used: int
    total: int


def check_gpus(subject: Subject) -> list[Finding]:
    """Check that the GPUs answer, and that no process of another job holds their memory."""
    program = find_program("nvidia-smi", subject.environ)
    has_driver = os.path.exists(subject.path("proc/driver/nvidia/version"))
    if program is None and has_driver:
        what = "this host has a GPU driver, but no nvidia-smi"
        remedy = (
            "docker --gpus=all with NVIDIA_DRIVER_CAPABILITIES=all; srun --gpus-per-node; nvidia.com/gpu of the pod"
        )
        return [warning(what, "/proc/driver/nvidia/version is there", remedy)]
    if program is None:
        return check_mask(subject.environ, [])
    text, failure = ask_smi(program, "--query-gpu=index,uuid,memory.used,memory.total")
    if failure:
        return [check_smi_failure(failure)]
    gpus = parse_gpus(text)
    text, _ = ask_smi(program, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    found = _check_memory(gpus, parse_processes(text))
    build = torch_build(subject.environ)
    if gpus and build is not None and not build & {"cuda", "hip"}:
        what = f"this host has {len(gpus)} GPUs, but the installed torch can't use them"
        found.append(problem(what, "it is built without CUDA", "install a build of torch with CUDA (pytorch.org)"))
    return found + check_mask(subject.environ, gpus)


def ask_smi(program: str, query: str) -> tuple[str, str]:
    """Return the answer of nvidia-smi, and the reason if there is none."""
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_SMI_TIMEOUT:.0f} s"
    except OSError as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or "it failed"


def check_smi_failure(failure: str) -> Finding:
    """Return the finding about a failure of nvidia-smi."""
    if "Driver/library version mismatch" in failure:
        what = "the GPU driver and its libraries have different versions: the driver was updated without a restart"
        return problem(what, failure.splitlines()[0], "restart this host, or reload the nvidia kernel modules")
    if failure.startswith("no answer"):
        what = f"nvidia-smi gives {failure}: the GPU driver hangs"
        return problem(what, "it was killed", "look for Xid in dmesg, drain this host and restart it")
    what = f"nvidia-smi fails: {failure.splitlines()[0]}"
    return problem(what, "", "look for NVRM and Xid in dmesg; nvidia-smi -q says more")


def _check_memory(gpus: Sequence[Gpu], processes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return the findings about GPU memory that is in use; `processes` has texts by the uuid of their GPU."""
    held = [gpu for gpu in gpus if gpu.used > _IDLE_MEMORY]
    if not held:
        return []
    names = ", ".join(f"{gpu.index}: {gpu.used} of {gpu.total} MiB" for gpu in held)
    owners = list(dict.fromkeys(text for gpu in held for text in processes.get(gpu.uuid, ())))
    what = f"the memory of {len(held)} GPU{'s' * (len(held) > 1)} is in use ({names})"
    if owners:
        return [problem(what, f"by {', '.join(owners[:4])}", "end these processes if they are of a dead job: kill PID")]
    remedy = "fuser -v /dev/nvidia* as root names the processes (they may be in another container)"
    return [problem(what, "nvidia-smi names no process", remedy)]


def check_mask(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Finding]:
    """Judge CUDA_VISIBLE_DEVICES: numbers, names that begin as GPUs', and parts of GPUs."""
    value = environ.get(_MASK)
    if value is None:
        return []
    if not value.strip() or value in {"-1", "NoDevFiles"}:
        return [warning(f"{_MASK}={value!r} hides all GPUs", f"{len(gpus)} are here", f"unset {_MASK}")] if gpus else []
    known = {str(gpu.index) for gpu in gpus}
    entries = [entry.strip() for entry in value.split(",")]
    missing = [
        entry
        for entry in entries
        if not entry.startswith("MIG-")
        and entry not in known
        and not any(gpu.uuid.startswith(entry) and entry.startswith("GPU-") for gpu in gpus)
    ]
    if not missing:
        return []
    lost = "which this host does not have: CUDA ignores this GPU and all after it"
    shown = f"0 to {len(gpus) - 1}" if gpus else "none"
    return [problem(f"{_MASK}={value} names GPU {missing[0]}, {lost}", f"GPUs here: {shown}", f"unset {_MASK}")]


def parse_gpus(text: str) -> list[Gpu]:
    """Read the answer about GPUs; a line that says [N/A] has no number."""
    found = []
    for line in text.splitlines():
        match [part.strip() for part in line.split(",")]:
            case [index, uuid, used, total] if index.isdecimal():
                found.append(Gpu(int(index), uuid, *(int(size) if size.isdecimal() else 0 for size in (used, total))))
    return found


def parse_processes(text: str) -> dict[str, list[str]]:
    """Read the answer about processes; the name comes last, for it may have commas."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match [part.strip() for part in line.split(",", 3)]:
            case [gpu, pid, used, command] if pid.isdecimal():
                found.setdefault(gpu, []).append(f"process {pid} ({_name(int(pid), command)}, {used} MiB)")
    return found


def _name(pid: int, command: str) -> str:
    """Return a process's name and user; of a process that can't be seen here, the name from nvidia-smi."""
    try:
        process = psutil.Process(pid)
        # For a long name psutil reads the command line, which may have to wait for a process in uninterruptible sleep.
        is_stuck = process.status() == psutil.STATUS_DISK_SLEEP
        return f"{os.path.basename(command) if is_stuck else process.name()} of {process.username()}"
    except (psutil.Error, OSError):
        return os.path.basename(command)
