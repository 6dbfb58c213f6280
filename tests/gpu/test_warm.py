"""Warm workers on a GPU: torch is preloaded without CUDA, and CUDA works in the forks, also after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.gpu.conftest import Record
    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Program = Callable[[str], Path]


@pytest.mark.parametrize("flag", ["--preload=torch", "--preload=auto", ""])
def test_workers_restart_on_the_gpu(flag: str, launch: Launch, program: Program, record: Record) -> None:
    """A rank is killed while its peer holds GPU memory; both start again, from the template where there is one."""
    flags = [flag] if flag else []
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--max-backoff=0", *flags, program("warm"))
    assert job.wait_exit() == 0
    killed = float(job.wait_line(r"killed at ([\d.]+)")[1])
    restarted = max(float(found[1]) for found in job.wait_lines(r"restarted at ([\d.]+)", count=2))
    record.add("restart", f"{flag or 'cold'}: {restarted - killed:.2f} s from the death to the last all-reduce")
    how = "warm" if flag == "--preload=torch" else "cold"
    if flag != "--preload=auto":
        assert job.stdout.count(f"attempt 1 is {how}") == 2, job.stderr
    assert job.stdout.count("began: 2.0") == 4


def test_a_module_that_initialises_cuda_is_not_preloaded(launch: Launch, program: Program) -> None:
    """The line names the module and CUDA, and the workers start cold."""
    env: dict[str, str | None] = {"PYTHONPATH": str(PROGRAMS)}
    job = launch("--nproc-per-node=1", "--preload=torch,initialises_cuda", program("collective"), env=env)
    assert job.wait_exit() == 0
    assert "initialises_cuda can't be preloaded: it initialises CUDA" in job.stderr


def test_a_module_that_asks_for_gpus_is_not_preloaded(launch: Launch, program: Program) -> None:
    """The driver's library opens devices and starts a thread for the question alone; the line names the module."""
    env: dict[str, str | None] = {"PYTHONPATH": str(PROGRAMS)}
    job = launch("--nproc-per-node=1", "--preload=torch,asks_for_cuda", program("collective"), env=env)
    assert job.wait_exit() == 0
    assert "asks_for_cuda can't be preloaded: it opens a device (/dev/nvidia" in job.stderr
    assert "rank 0 began: 1.0" in job.stdout
