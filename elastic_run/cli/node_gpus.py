"""The GPUs of this node: the default number of workers on a cluster, and a line where there are more workers."""

from __future__ import annotations

import os

from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
#: Variables that say which GPUs a process may use, and their values for none.
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_HIDDEN = ("", "-1", "NoDevFiles")


def count_node_gpus(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the number of GPUs that this launcher may use, or 1 if there is none, and notices for the user.

    Raises:
        UsageError: The node has a driver and no variable hides its GPUs, but there are none.
    """
    if not any(map(os.path.exists, _DRIVERS)) or any(environ.get(name) in _HIDDEN for name in _MASKS):
        return "1", []
    # Most nodes of tests have none.
    from elastic_run.cluster.devices import DeviceError, device_count, torch_build

    try:
        return str(device_count("gpu", environ)), []
    except DeviceError as error:
        reason = str(error).partition(";")[0]
        build = torch_build(environ)
        if build is not None and not build & {"cuda", "hip"}:
            return "1", [f"this node has a GPU driver, but its worker gets no GPU: {reason}"]
        message = (
            f"--nproc-per-node: this node has a GPU driver, but {reason}: give --nproc-per-node=1 to train without GPUs"
        )
        raise UsageError(message) from None


def compare_workers(workers: str, environ: Mapping[str, str]) -> list[str]:
    """Return a notice where there are more workers than visible GPUs, or one worker and several GPUs.

    More workers may be meant to train on CPUs, and one worker may use several GPUs.

    Args:
        workers: As given for --nproc-per-node; only a number is compared.
        environ: The environment.
    """
    if not workers.isdecimal() or not any(map(os.path.exists, _DRIVERS)):
        return []
    from elastic_run.cluster.devices import torch_build, visible_gpus

    build = torch_build(environ)
    # A notice is not worth the seconds of nvidia-smi.
    gpus = len(visible_gpus(environ, asks_program=False)) if build is not None and build & {"cuda", "hip"} else 0
    if int(workers) == 1 < gpus:
        idle = f"{gpus - 1} GPU{'s are' if gpus > 2 else ' is'} idle"  # noqa: PLR2004 - the worker's own is the other one
        return [f"{idle}: --nproc-per-node=gpu starts a worker for each GPU (a script may also use several by itself)"]
    if not 0 < gpus < int(workers):
        return []
    seen = f"{gpus} GPU{'s' * (gpus != 1)}"
    mask = next((f" ({name}={environ[name]})" for name in _MASKS if environ.get(name)), "")
    return [
        (
            f"--nproc-per-node: {workers} workers see {seen}{mask}: a script that uses the GPU with the number "
            f"LOCAL_RANK fails in {int(workers) - gpus} of them; --nproc-per-node=gpu starts a worker for each GPU"
        )
    ]
