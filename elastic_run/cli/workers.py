"""How many workers this node gets, by its devices, and how many OpenMP threads each of them.

torchrun gives each of several workers one thread, since the workers' libraries would otherwise take one for every CPU
of the machine each. `--omp-threads` gives more; a value in the environment always counts, as under torchrun.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.values import WORKER_COUNTS, whole_number, worker_count
from elastic_run.errors import UsageError
from elastic_run.multiprocessing.process.interpreter import own_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
#: Variables that say which GPUs a process may use, and their values for none.
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_HIDDEN = ("", "-1", "NoDevFiles")
_THREADS = contract.ENV_OMP_NUM_THREADS


def count_workers(nproc_per_node: str, environ: Mapping[str, str]) -> int:
    """Return the number of workers that a value of --nproc-per-node means on this node, at least 1.

    Raises:
        UsageError: It is neither a number nor a device, or there is no such device here.
    """
    try:
        return whole_number(nproc_per_node, least=1, allowed="a number")
    except ValueError:
        pass
    try:
        word = worker_count(nproc_per_node)
    except ValueError as error:
        message = f"--nproc-per-node: {nproc_per_node!r} {error}"
        raise UsageError(message) from None
    from elastic_run.cluster.devices import DeviceError, UnknownDeviceError, device_count

    try:
        return device_count(word, environ, python=own_interpreter())
    except UnknownDeviceError:
        message = f"--nproc-per-node: {word!r} is not {WORKER_COUNTS}, nor a device that a package adds to torch"
    except DeviceError as error:
        message = f"--nproc-per-node: {word!r}, but {error}"
    raise UsageError(message)


def count_node_gpus(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the number of GPUs that this launcher may use, or 1 if there is none, and notices for the user.

    Raises:
        UsageError: The node has a driver and no variable hides its GPUs, but there are none.
    """
    if not any(map(os.path.exists, _DRIVERS)) or any(environ.get(name) in _HIDDEN for name in _MASKS):
        return "1", []
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


def compare_with_gpus(nproc_per_node: str, environ: Mapping[str, str]) -> list[str]:
    """Return a notice where there are more workers than visible GPUs, or one worker and several GPUs.

    More workers may be meant to train on CPUs, and one worker may use several GPUs. Only a number is compared.
    """
    if not nproc_per_node.isdecimal() or not any(map(os.path.exists, _DRIVERS)):
        return []
    from elastic_run.cluster.devices import torch_build, visible_gpus

    workers, build = int(nproc_per_node), torch_build(environ)
    # A notice is not worth the seconds of nvidia-smi.
    gpus = len(visible_gpus(environ, asks_program=False)) if build is not None and build & {"cuda", "hip"} else 0
    if workers == 1 < gpus:
        idle = f"{gpus - 1} GPU{'s are' if gpus > 2 else ' is'} idle"  # noqa: PLR2004 - the worker's own is the other one
        return [f"{idle}: --nproc-per-node=gpu starts a worker for each GPU (a script may also use several by itself)"]
    if not 0 < gpus < workers:
        return []
    seen = f"{gpus} GPU{'s' * (gpus != 1)}"
    mask = next((f" ({name}={environ[name]})" for name in _MASKS if environ.get(name)), "")
    notice = (
        f"--nproc-per-node: {workers} workers see {seen}{mask}: a script that uses the GPU with the number "
        f"LOCAL_RANK fails in {workers - gpus} of them; --nproc-per-node=gpu starts a worker for each GPU"
    )
    return [notice]


def choose_threads(flag: int | str | None, workers: int, environ: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Choose the number of threads of each worker.

    Args:
        flag: The value of --omp-threads, or None.
        workers: Workers on this node.
        environ: The environment.

    Returns:
        The value to set, or None to leave the environment as it is; its reason, "" for the flag; a line for the user.
    """
    given = environ.get(_THREADS)
    if given is not None:
        unused = f"--omp-threads: {flag} is not used, since {_THREADS}={given} is set"
        return None, "", unused if flag is not None and str(flag) != given else ""
    if flag == "auto":
        from elastic_run.cluster.limits import core_count

        cores = core_count()
        count = max(1, cores // workers)
        reason = f"{cores} core{'s' * (cores != 1)} for {workers} worker{'s' * (workers != 1)}"
        return count, reason, f"{_THREADS}={count} for each worker ({reason})"
    if flag is not None:
        return int(flag), "", f"{_THREADS}={flag} for each worker"
    if workers == 1:
        return None, "", ""
    notice = (
        f"{_THREADS} is not set: each of the {workers} workers gets 1 thread (--omp-threads=auto divides the cores)"
    )
    return 1, "several workers on this node", notice
