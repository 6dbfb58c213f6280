"""Makes the dumps in this directory: `python -m tests.data.flight_recorder.make` with torch 2.13, gloo, on the CPU.

Each scenario runs four ranks, one of which does something else. All ranks write what their flight recorder holds while
they wait. The dumps are as torch writes them but for the paths in their stacks, which are cut to the file's name.
`nothing_recorded` is not made here: --flight-recorder wrote it in a job with torch 2.6.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLD = 4
SCENARIOS = ("missing_rank", "missing_in_subgroup", "other_operation", "other_size", "other_order", "all_joined")
#: Seconds after which all ranks that can be there are in their last collective.
_SETTLED = 4.0


def main(scenarios: list[str]) -> None:
    """Run the scenarios one after another."""
    for scenario in scenarios or SCENARIOS:
        directory = HERE / scenario
        directory.mkdir(exist_ok=True)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", scenario],
                env={**os.environ, **common, "RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "50"},
            )
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.wait()


def run_rank(scenario: str) -> None:
    """Run one rank of a scenario."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    threading.Thread(target=_dump_and_end, args=(scenario, dist.get_rank())).start()
    globals()[f"_{scenario}"](dist, dist.get_rank())
    time.sleep(_SETTLED * 2)


def _dump_and_end(scenario: str, rank: int) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    time.sleep(_SETTLED)
    dump = pickle.loads(_dump_fr_trace())  # noqa: S301 - from this process
    for entry in dump["entries"]:
        for frame in entry["frames"]:
            path = frame["filename"]
            frame["filename"] = (
                path[path.find("/site-packages/") :] if "/site-packages/" in path else path.rpartition("/")[2]
            )
    (HERE / scenario / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    os._exit(0)


def _missing_rank(dist: Any, rank: int) -> None:
    import torch

    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank != 3:
        dist.all_reduce(torch.ones(4))


def _missing_in_subgroup(dist: Any, rank: int) -> None:
    import torch

    groups = [dist.new_group([0, 1], group_desc="left"), dist.new_group([2, 3], group_desc="right")]
    dist.all_reduce(torch.ones(4))
    if rank != 3:
        dist.all_reduce(torch.ones(4), group=groups[rank // 2])
        dist.all_reduce(torch.ones(8))


def _other_operation(dist: Any, rank: int) -> None:
    import torch

    dist.all_reduce(torch.ones(4))
    if rank == 1:
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))


def _other_size(dist: Any, rank: int) -> None:
    import torch

    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(1_000_000 if rank == 2 else 4))


def _other_order(dist: Any, rank: int) -> None:
    import torch

    dist.all_reduce(torch.ones(4))
    one, two = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="two")
    if rank < 2:
        dist.all_reduce(torch.ones(4), group=one if rank else two)


def _all_joined(dist: Any, rank: int) -> None:
    import torch

    dist.all_reduce(torch.ones(4))
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    else:
        main(sys.argv[1:])
