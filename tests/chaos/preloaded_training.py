"""A worker that does what real programs do with processes and threads, for many starts and restarts under --preload.

    preloaded_training.py DIRECTORY FAILURES

DIRECTORY is shared: a worker writes `done.RESTART.RANK` there by `atexit`, as a program saves its state, and an empty
file with the name of each line that it has printed. PART_SEED, the rank and the number of restarts choose the part that
a worker runs. In the first FAILURES rounds, rank 0 fails.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable


class _Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


def _square(number: int) -> int:
    return number * number


def _wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + torch.cos(x) * x


def compile_function() -> None:
    """Compile a function with the default backend, with the compiler's own processes."""
    x = torch.linspace(0, 1, 64)
    torch.testing.assert_close(torch.compile(_wave)(x), _wave(x))


def load_data(method: str) -> None:
    """Read a data set through one process that multiprocessing starts with this method."""
    loader = DataLoader(_Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert sum(int(batch.sum()) for batch in loader) == 140


def use_pools() -> None:
    """Compute in a pool of processes, in one of futures and in threads; one pool is left to the interpreter's end."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_square, range(4)) == [0, 1, 4, 9]
    left = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"))
    assert left.submit(_square, 5).result() == 25
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_square, range(4))) == [0, 1, 4, 9]


def reduce_together() -> None:
    """Form a process group, reduce, and leave the group to the interpreter's end."""
    torch.distributed.init_process_group("gloo")
    total = torch.ones(4)
    torch.distributed.all_reduce(total)
    assert int(total[0]) == int(os.environ["WORLD_SIZE"])


PARTS: tuple[Callable[[], None], ...] = (
    compile_function,
    lambda: load_data("fork"),
    lambda: load_data("spawn"),
    lambda: load_data("forkserver"),
    use_pools,
)


def _fail(number: int) -> None:
    """End as programs end: by an exception, without a clean-up, killed, or while a child of theirs still works."""
    way = number % 4
    if way == 1:
        os._exit(3)
    if way == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if way == 3:
        multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
    message = f"the failure of number {number}"
    raise RuntimeError(message)


def _print_line(line: str, directory: Path) -> None:
    """Print a line, and then note that it was printed."""
    print(line, flush=True)  # noqa: T201 - a worker prints
    (directory / line).touch()


def main() -> None:
    """Run one part, another one in each rank, and every third time a collective; then end or fail."""
    directory, failures = Path(sys.argv[1]), int(sys.argv[2])
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    atexit.register((directory / f"done.{restart}.{rank}").touch)
    _print_line(f"started.{restart}.{rank}", directory)
    number = int(os.environ["PART_SEED"]) + restart
    if number % 3 == 0:
        reduce_together()
    PARTS[(number + rank) % len(PARTS)]()
    _print_line(f"worked.{restart}.{rank}", directory)
    if restart < failures and rank == 0:
        _fail(number)


if __name__ == "__main__":
    main()
