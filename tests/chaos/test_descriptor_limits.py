"""The running launcher where descriptors are scarce: it starts what can be started, and says what is needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def test_many_workers_under_a_low_limit_of_descriptors(launch: Launch) -> None:
    """The launcher raises its own limit where its workers need it, and they begin with the one they would have had."""
    program = ("sh", "-c", 'ulimit -Sn 256; exec "$0" -m elastic_run "$@"', sys.executable)
    job = launch("--nproc-per-node=96", "--no-python", "sh", "-c", "ulimit -Sn", program=program)
    assert job.wait_exit(deadline=60) == 0
    assert job.stdout.splitlines() == ["256"] * 96


@pytest.mark.parametrize(("workers", "limit"), [(96, 256), (16, 64)])
def test_so_many_streams_that_a_worker_cannot_begin_with_its_limit(
    launch: Launch, tmp_path: Path, workers: int, limit: int
) -> None:
    """With more pipes than the workers' limit allows they get it right after their start."""
    program = ("sh", "-c", f'ulimit -Sn {limit}; exec "$0" -m elastic_run "$@"', sys.executable)
    flags = (f"--nproc-per-node={workers}", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--no-python")
    script = f"until [ $(ulimit -Sn) = {limit} ]; do :; done; ulimit -Sn"
    job = launch(*flags, "sh", "-c", script, program=program)
    assert job.wait_exit(deadline=60) == 0
    assert [line.rpartition(":")[2] for line in job.stdout.splitlines()] == [str(limit)] * workers


@pytest.mark.parametrize(("workers", "limit", "needed"), [(96, 256, 696), (4, 22, 52)])
def test_more_workers_than_descriptors(launch: Launch, tmp_path: Path, workers: int, limit: int, needed: int) -> None:
    """Where the hard limit is too low nothing is started, and the message says what is missing."""
    program = ("sh", "-c", f'ulimit -n {limit}; exec "$0" -m elastic_run "$@"', sys.executable)
    flags = (f"--nproc-per-node={workers}", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--no-python")
    job = launch(*flags, "echo", "begun", program=program)
    assert job.wait_exit() == contract.EXIT_CANNOT_START
    message = f"{workers} workers need {needed} file descriptors here, but only {limit} are allowed (ulimit -n)"
    assert message in " ".join(job.stderr.split())
    assert "begun" not in job.stdout


@pytest.mark.parametrize("limits", ["-n 64", "-Sn 64"])
def test_an_inherited_descriptor_beyond_the_limit(launch: Launch, worker: Worker, limits: str) -> None:
    """A descriptor from before the limit was lowered keeps no worker from starting, and no worker has it."""
    lower = f'ulimit {limits}; exec "$0" -m elastic_run "$@"'
    program = (
        sys.executable,
        "-c",
        f"import os, sys; os.dup2(0, 200); os.execvp('sh', {['sh', '-c', lower]} + sys.argv[1:])",
    )
    job = launch(
        sys.executable, "--nproc-per-node=2", worker("say(os.path.exists('/proc/self/fd/200'))"), program=program
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "False\n" * 2
