"""--keep-state with tensors and random numbers of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launch

    Program = Callable[[str], Path]


def test_a_killed_worker_goes_on_with_the_same_losses(launch: Launch, program: Program) -> None:
    """The losses of 40 steps are bit by bit those of a run that nothing disturbed."""
    flags = ("--keep-state=64MB", "--max-restarts=1", "--preload=torch")
    losses = []
    for how in ("kill", "calm"):
        job = launch(*flags, program("kept"), how)
        assert job.wait_exit() == 0, job.stderr
        losses.append([line for line in job.stdout.splitlines() if line.startswith("step")])
    assert list(dict.fromkeys(losses[0])) == losses[1]
