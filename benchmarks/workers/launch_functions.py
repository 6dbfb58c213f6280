"""Launches a function in workers, and prints how many milliseconds that took, from the call to the values.

Usage: launch_functions.py elastic-run|torchrun START_METHOD NPROC [torch]
"""

from __future__ import annotations

import os
import sys
import time

if sys.argv[4:] == ["torch"]:
    import torch  # noqa: F401 - what most programs do, and what each spawned worker does again


def work() -> int:
    """Return this worker's rank."""
    return int(os.environ["RANK"])


def main() -> None:
    """Launch once, as a program does."""
    if sys.argv[1] == "torchrun":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    else:
        from elastic_run import LaunchConfig, elastic_launch  # type: ignore[assignment]
    nproc = int(sys.argv[3])
    options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "functions", "max_restarts": 0}
    config = LaunchConfig(1, 1, nproc, start_method=sys.argv[2], **options)  # type: ignore[arg-type]
    started = time.monotonic()
    values = elastic_launch(config, work)()
    milliseconds = (time.monotonic() - started) * 1000
    if values != {rank: rank for rank in range(nproc)}:
        sys.exit(f"wrong values: {values}")
    print(f"{milliseconds:.1f}", flush=True)


if __name__ == "__main__":
    main()
