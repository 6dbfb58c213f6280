"""Which GPUs a worker will see, found without torch and without a driver's library; and what processes take of them.

The driver of NVIDIA lists its GPUs in /proc/driver/nvidia/gpus, named by PCI address, with minor number and UUID; AMD's
stand in the kernel's topology (kfd), Intel's among the cards of the kernel. CUDA may number unequal GPUs by speed; we
number by PCI address, as nvidia-smi and CUDA_DEVICE_ORDER=PCI_BUS_ID do. torch's build decides in the end: a torch
without CUDA sees no GPU. Its version file, which names the devices that it was built for, is read as text. For devices
that packages add to torch, torch is asked (`torch_devices`).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from elastic_run.cluster.limits import ROOT, cpu_count, list_names, read_text
from elastic_run.cluster.torch_devices import TorchUnavailableError, count_by_torch
from elastic_run.contract import ENV_CUDA_VISIBLE_DEVICES, ENV_HIP_VISIBLE_DEVICES, WORKER_COUNT_WORDS
from elastic_run.files import find_program
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_NVIDIA_SMI = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_NVIDIA_SMI_TIMEOUT = 30.0
#: Seconds before now in which a process has computed or has not. The driver takes a sample at least once a second.
_WINDOW = 2.0


class DeviceError(ValueError):
    """No device of a kind can be used here; the message gives the reason."""


class UnknownDeviceError(DeviceError):
    """No package adds a device of this name to torch."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: its address as in /sys/bus/pci/devices and NVIDIA's name for it, both empty if not known."""

    pci_address: str = ""
    uuid: str = ""


def device_count(word: str, environ: Mapping[str, str], *, root: str = ROOT, python: str = "") -> int:
    """Return the number of devices or CPUs of a kind on this machine, for a worker on each, or raise DeviceError.

    `word` is auto, cpu, gpu, xpu, or the name that a package has given to its device for torch, such as npu; `python`
    is the interpreter in which torch is asked for such devices, "" where there is none.
    """
    if word == "cpu":
        return cpu_count(root=root)
    if word not in WORKER_COUNT_WORDS:
        return _count_of_package(word, environ, python)
    build = torch_build(environ)
    gpus = len(visible_gpus(environ, root=root)) if build is None or build & {"cuda", "hip"} else 0
    xpus = len(visible_xpus(environ, root=root)) if build is None or "xpu" in build else 0
    if word == "auto":
        of_packages = 0
        if not gpus and not xpus:
            with suppress(TorchUnavailableError):  # the workers will say why, where they need torch
                of_packages = count_by_torch("auto", environ, python, sys.path) or 0
        return gpus or xpus or of_packages or cpu_count(root=root)
    found = gpus if word == "gpu" else xpus
    if found:
        return found
    needed = {"cuda", "hip"} if word == "gpu" else {"xpu"}
    mask = "CUDA_VISIBLE_DEVICES" if word == "gpu" else "ZE_AFFINITY_MASK"
    if build is not None and not build & needed:
        why = f"the installed torch is built without {' and '.join(sorted(needed))}"
    else:
        why = f"no {word} is visible here" + (f" ({mask}={environ[mask]!r})" if mask in environ else "")
    message = f"{why}; 'auto' counts CPUs instead"
    raise DeviceError(message)


def _count_of_package(word: str, environ: Mapping[str, str], python: str) -> int:
    try:
        found = count_by_torch(word, environ, python, sys.path)
    except TorchUnavailableError as error:
        message = f"torch can't say how many there are: {error}"
        raise DeviceError(message) from None
    if found is None:
        message = f"{word!r} is not a device that a package adds to torch"
        raise UnknownDeviceError(message)
    if not found:
        message = f"no {word} is available here; 'auto' counts CPUs instead"
        raise DeviceError(message)
    return found


def visible_gpus(environ: Mapping[str, str], *, root: str = ROOT, asks_program: bool = True) -> list[Device]:
    """Find the GPUs that a worker will see, NVIDIA's or AMD's, in the order of their numbers there."""
    nvidia = find_nvidia(root=root, asks_program=asks_program)
    if nvidia:
        return select_cuda(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    amd = select_by_index(find_amd(root=root), environ.get("ROCR_VISIBLE_DEVICES"))
    return select_by_index(amd, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))


def find_nvidia(*, root: str = ROOT, asks_program: bool = True) -> list[Device]:
    """Find NVIDIA's GPUs, by PCI address; without `asks_program`, nvidia-smi is not asked, which takes seconds."""
    driver = os.path.join(root, "proc/driver/nvidia/gpus")
    devices = os.path.join(root, "dev")
    listed = [name for name in list_names(devices) if name[:6] == "nvidia" and name[6:].isdecimal()]
    # A container or a step of Slurm may see all GPUs in /proc, or the files of all, and be denied access to some.
    files = {name for name in listed if os.access(os.path.join(devices, name), os.R_OK | os.W_OK)}
    if listed and not files:
        return []
    found = []
    for address in sorted(list_names(driver)):
        facts = _read_facts(os.path.join(driver, address, "information"), ":")
        # The files are made when the first program uses the GPUs: none at all says nothing.
        if not files or "nvidia" + facts.get("Device Minor", "") in files:
            found.append(Device(address.lower(), facts.get("GPU UUID", "")))
    if found or files:
        return found or [Device() for _ in files]
    return _ask_nvidia_smi() if root == ROOT and asks_program else []  # in WSL there is neither


def _ask_nvidia_smi() -> list[Device]:
    """Have nvidia-smi list the GPUs: a second or two, so it comes last."""
    program = next((path for name in _NVIDIA_SMI if (path := find_program(name, os.environ))), None)
    if program is None:
        return []
    import subprocess

    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> list[Device]:
    """Read the output of `nvidia-smi -L`; the indented lines of MIG devices don't count."""
    lines = (line for line in text.splitlines() if line.startswith("GPU "))
    return [Device(uuid=line.partition("(UUID: ")[2].rstrip(")")) for line in lines]


def select_cuda(devices: Sequence[Device], mask: str | None) -> list[Device]:
    """Return the GPUs that CUDA will see with CUDA_VISIBLE_DEVICES, in CUDA's order; None is a mask that isn't set.

    CUDA stops reading at the first entry that is wrong, and a repeated one leaves none. Of MIG devices it sees one.
    """
    if mask is None:
        return list(devices)
    chosen: list[Device] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.startswith("MIG-"):
            parents = [device for device in devices if device.uuid and device.uuid in entry]
            return chosen or parents or [Device()]
        found = _find_cuda(devices, entry)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _find_cuda(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    found = [device for device in devices if entry.startswith("GPU-") and device.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def select_by_index(devices: Sequence[Device], mask: str | None) -> list[Device]:
    """Keep the devices whose indices are listed, up to the first entry that is wrong; None keeps all."""
    if mask is None:
        return list(devices)
    chosen = []
    for entry in (part.strip() for part in mask.split(",")):
        if not entry.isdecimal() or int(entry) >= len(devices):
            break
        chosen.append(devices[int(entry)])
    return chosen


def find_amd(*, root: str = ROOT) -> list[Device]:
    """Find AMD's GPUs, in the order of the kernel's topology."""
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    files = list_names(os.path.join(root, "dev/dri"))
    found = []
    for node in sorted((name for name in list_names(nodes) if name.isdecimal()), key=int):
        facts = _read_facts(os.path.join(nodes, node, "properties"), " ")
        if facts.get("simd_count", "0") != "0" and f"renderD{facts.get('drm_render_minor')}" in files:
            # The location is bus, device and function in 8, 5 and 3 bits.
            domain, place = int(facts.get("domain", "0")), int(facts.get("location_id", "0"))
            address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 0x7}"
            found.append(Device(address))
    return found


def virtual_device(local_rank: int, parent: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that leave a worker its own device, or raise ValueError where the launcher has too few."""
    # HIP_VISIBLE_DEVICES comes first, as in ROCm.
    name = ENV_HIP_VISIBLE_DEVICES if parent.get(ENV_HIP_VISIBLE_DEVICES) else ENV_CUDA_VISIBLE_DEVICES
    visible = parent.get(name)
    devices = visible.split(",") if visible is not None else [*map(str, range(local_rank + 1))]
    if local_rank >= len(devices):
        message = f"local rank {local_rank} has no device in {name}={visible}"
        raise ValueError(message)
    return dict.fromkeys((ENV_CUDA_VISIBLE_DEVICES, name), devices[local_rank].strip())


def visible_xpus(environ: Mapping[str, str], *, root: str = ROOT) -> list[Device]:
    """Find Intel's discrete GPUs that a worker will see, one device for each tile."""
    cards = os.path.join(root, "sys/class/drm")
    found = []
    for name in sorted(list_names(cards)):
        device = os.path.join(cards, name, "device")
        if not name.startswith("renderD") or read_text(os.path.join(device, "vendor")).strip() != "0x8086":
            continue
        address = os.path.basename(os.path.realpath(device))
        if address.startswith("0000:00:02."):  # the one inside the processor
            continue
        tiles = sum(1 for entry in list_names(device) if entry[:4] == "tile" and entry[4:].isdecimal())
        found += [Device(address)] * max(tiles, 1)
    return select_by_index(found, environ.get("ZE_AFFINITY_MASK"))


def torch_build(environ: Mapping[str, str], directory: str | None = None) -> frozenset[str] | None:
    """Return the kinds of devices that the installed torch was built for: cuda, hip, xpu; None if that is not known."""
    if directory is None and not environ.get("PYTHON_EXEC"):  # with which the workers' torch is another one
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("torch")
        directory = os.path.dirname(spec.origin) if spec is not None and spec.origin else ""
    text = read_text(os.path.join(directory, "version.py")) if directory else ""
    if not text:
        return None
    lines = [line.partition("=") for line in text.splitlines()]
    values = {name.partition(":")[0].strip(): value.strip() for name, _, value in lines}
    return frozenset(name for name in ("cuda", "hip", "xpu") if values.get(name, "None") != "None")


def _read_facts(path: str, separator: str) -> dict[str, str]:
    lines = (line.partition(separator) for line in read_text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


# --- what processes take of GPUs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one process takes of all GPUs of this machine."""

    busy: float | None  # Percent of the time in which its GPUs computed, for any process; the mean of several GPUs
    memory: int | None  # Bytes, or None where the driver does not tell
    computes: bool  # Whether a GPU has computed for it lately, or for any process if the driver does not tell


def has_library() -> bool:
    """Whether nvidia-ml-py is installed; it is not imported."""
    from importlib.util import find_spec

    return find_spec("pynvml") is not None


def read_gpu_use() -> dict[int, GpuUse]:
    """Return what each process takes, by pid in this machine's first namespace; an ill driver may take long."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}  # no driver, or no GPU
    found: dict[int, list[GpuUse]] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            for pid, use in _read_device(pynvml, index):
                found.setdefault(pid, []).append(use)
    except pynvml.NVMLError:
        pass  # what was read counts
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return {pid: _add(uses) for pid, uses in found.items()}


@dataclass(frozen=True, slots=True)
class GpuClock:
    """The clock of one GPU."""

    index: int  # Its number, as nvidia-smi has it
    clock: int  # MHz
    highest: int  # MHz
    reasons: tuple[str, ...]  # What holds the clock down, such as `thermal`; none is known, or the GPU is idle


#: NVML's bits of the reasons for a low clock, in `nvml.h`; that of an idle GPU is left out.
_THROTTLING = {
    0x60: "thermal",
    0x80: "power brake",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "synchronised with a slower GPU",
    0x102: "clock setting",
}


def read_gpu_clocks() -> dict[int, GpuClock]:
    """Return the clock of the slowest GPU of each process, by pid; an ill driver may take long."""
    import pynvml

    found: dict[int, GpuClock] = {}
    with suppress(pynvml.NVMLError):  # no driver, or no GPU
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # this GPU was lost, or has no clock of its own (MIG)
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
                clock = GpuClock(
                    index,
                    pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
                    tuple(reason for mask, reason in _THROTTLING.items() if bits & mask),
                )
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                    found[process.pid] = min(found.get(process.pid, clock), clock, key=lambda each: each.clock)
        pynvml.nvmlShutdown()
    return found


def _read_device(pynvml: Any, index: int) -> list[tuple[int, GpuUse]]:
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return []  # this GPU was lost
    try:
        busy = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except pynvml.NVMLError:
        busy = None  # a part of a GPU (MIG) has no such figure
    computing = _find_computing(pynvml, device)
    return [
        (
            process.pid,
            GpuUse(busy, process.usedGpuMemory, computes=bool(busy) if computing is None else process.pid in computing),
        )
        for process in processes
    ]


def _find_computing(pynvml: Any, device: Any) -> frozenset[int] | None:
    """Return the processes for which a GPU has computed lately, or None where the driver doesn't tell (MIG, WSL)."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(device, int((time.time() - _WINDOW) * 1e6))
    except pynvml.NVMLError_NotFound:
        return frozenset()  # the driver tells, and no process has used the GPU
    except pynvml.NVMLError:
        return None
    return frozenset(each.pid for each in samples if each.smUtil or each.memUtil or each.encUtil or each.decUtil)


def _add(uses: list[GpuUse]) -> GpuUse:
    busy = [use.busy for use in uses if use.busy is not None]
    memory = [use.memory for use in uses if use.memory is not None]
    computes = any(use.computes for use in uses)
    return GpuUse(sum(busy) / len(busy) if busy else None, sum(memory) if memory else None, computes)
