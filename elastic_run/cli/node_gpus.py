"""The default number of workers on a node of a cluster: one for each GPU that the launcher may use."""

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
    from elastic_run.cluster.devices import DeviceError, device_count, torch_build  # noqa: PLC0415

    try:
        return str(device_count("gpu", environ)), []
    except DeviceError as error:
        reason = str(error).partition(";")[0]
        build = torch_build(environ)
        if build is not None and not build & {"cuda", "hip"}:
            return "1", [f"this node has a GPU driver, but 1 worker without a GPU: {reason}"]
        message = (
            f"--nproc-per-node: this node has a GPU driver, but {reason}: give --nproc-per-node=1 to train without GPUs"
        )
        raise UsageError(message) from None
