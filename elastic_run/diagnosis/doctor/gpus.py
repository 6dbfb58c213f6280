"""GPUs: they answer, the driver fits, and no process of another job holds their memory. A machine without one is fine.

nvidia-smi hangs with a sick driver, so it gets a deadline. It runs in a process of its own, which is killed then.
"""

from __future__ import annotations

import os

import psutil

from elastic_run.cluster.devices import torch_build
from elastic_run.cluster.limits import list_names
from elastic_run.cluster.paths import find_program
from elastic_run.diagnosis.doctor.finding import problem, warning
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_MASK = "CUDA_VISIBLE_DEVICES"
#: Seconds: it takes one or two on a healthy machine with eight GPUs that are not in persistence mode.
_TIMEOUT = 15.0
#: MiB that a GPU has in use without any process.
_IDLE_MEMORY = 1024
_MISMATCH = "Driver/library version mismatch"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as nvidia-smi knows it.

    Attributes:
        index: Its number.
        uuid: Its name.
        used: MiB of its memory in use.
        total: MiB of its memory.
    """

    index: int
    uuid: str
    used: int
    total: int


def check(subject: Subject) -> list[Finding]:
    """Ask nvidia-smi for the GPUs and the processes on them."""
    program = find_program("nvidia-smi", subject.environ)
    has_driver = os.path.exists(subject.path("proc/driver/nvidia/version"))
    if program is None:
        return judge_mask(subject.environ, []) if not has_driver else [_judge_missing_program(subject)]
    text, failure = ask(program, "--query-gpu=index,uuid,memory.used,memory.total")
    if failure:
        return [judge_failure(failure)]
    gpus = parse_gpus(text)
    text, _ = ask(program, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    found = judge_memory(gpus, parse_processes(text))
    build = torch_build(subject.environ)
    if gpus and build is not None and not build & {"cuda", "hip"}:
        what = f"this host has {len(gpus)} GPUs, but the installed torch can't use them"
        found.append(problem(what, "it is built without CUDA", "install a build of torch with CUDA (pytorch.org)"))
    return found + judge_mask(subject.environ, gpus)


def _judge_missing_program(subject: Subject) -> Finding:
    files = [name for name in list_names(subject.path("dev")) if name[:6] == "nvidia" and name[6:].isdecimal()]
    if files:
        what = "this host has a GPU driver, but no nvidia-smi"
        return warning(what, f"/dev has {len(files)} GPUs", "start the container with NVIDIA_DRIVER_CAPABILITIES=all")
    what = "this host has a GPU driver, but this process sees no GPU"
    return problem(what, "/dev has no nvidia0", "docker --gpus=all; srun --gpus-per-node; nvidia.com/gpu of the pod")


def ask(program: str, query: str) -> tuple[str, str]:
    """Return the answer of nvidia-smi, and the reason if there is none."""
    import subprocess

    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_TIMEOUT:.0f} s"
    except OSError as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or "it failed"


def judge_failure(failure: str) -> Finding:
    """Return the finding about a failure of nvidia-smi."""
    if _MISMATCH in failure:
        what = "the GPU driver and its libraries have different versions: the driver was updated without a restart"
        return problem(what, failure.splitlines()[0], "restart this host, or reload the nvidia kernel modules")
    if failure.startswith("no answer"):
        what = f"nvidia-smi gives {failure}: the GPU driver hangs"
        return problem(what, "it was killed", "look for Xid in dmesg, drain this host and restart it")
    what = f"nvidia-smi fails: {failure.splitlines()[0]}"
    return problem(what, "", "look for NVRM and Xid in dmesg; nvidia-smi -q says more")


def judge_memory(gpus: Sequence[Gpu], processes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return the findings about GPU memory that is in use.

    Args:
        gpus: The GPUs.
        processes: Texts about processes, by the uuid of their GPU.
    """
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


def judge_mask(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> list[Finding]:
    """Judge CUDA_VISIBLE_DEVICES."""
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
    what = (
        f"{_MASK}={value} names GPU {missing[0]}, which this host does not have: CUDA ignores this GPU and all after it"
    )
    shown = f"0 to {len(gpus) - 1}" if gpus else "none"
    return [problem(what, f"GPUs here: {shown}", f"unset {_MASK}")]


def parse_gpus(text: str) -> list[Gpu]:
    """Read the answer about GPUs; a line that says [N/A] has no number."""
    rows = ([part.strip() for part in line.split(",")] for line in text.splitlines())
    return [
        Gpu(int(row[0]), row[1], _number(row[2]), _number(row[3]))
        for row in rows
        if len(row) == 4 and row[0].isdecimal()  # noqa: PLR2004 - the columns that were asked for
    ]


def parse_processes(text: str) -> dict[str, list[str]]:
    """Read the answer about processes; the name comes last, for it may have commas."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        row = [part.strip() for part in line.split(",", 3)]
        if len(row) == 4 and row[1].isdecimal():  # noqa: PLR2004 - the columns that were asked for
            found.setdefault(row[0], []).append(f"process {row[1]} ({_name(int(row[1]), row[3])}, {row[2]} MiB)")
    return found


def _name(pid: int, command: str) -> str:
    """Return a process's name and user; of a process that can't be seen here, the name that nvidia-smi tells."""
    try:
        process = psutil.Process(pid)
        # For a long name psutil reads the command line, which may have to wait for a process in uninterruptible sleep.
        is_stuck = process.status() == psutil.STATUS_DISK_SLEEP
        return f"{os.path.basename(command) if is_stuck else process.name()} of {process.username()}"
    except (psutil.Error, OSError):
        return os.path.basename(command)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
