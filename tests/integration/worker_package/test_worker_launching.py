"""A script that starts its own workers, in plain python and under launchers."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

PYTHON = (sys.executable,)
QUIET = {"OMP_NUM_THREADS": "1"}
HEAD = """
import os, sys
import elastic_run.worker as worker
from elastic_run import ChildFailedError, LaunchConfig

def train(scale, fail=False):
    context = worker.init_distributed()
    if fail and context.rank == 1:
        raise ValueError("no such data")
    return [context.rank, context.world_size, context.launcher, worker.reduce_mean(context.rank * scale)]
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script with a function `train`; the body is its main part."""

    def write(body: str) -> Path:
        path = tmp_path / "self_made.py"
        main = textwrap.indent(textwrap.dedent(body), "    ")
        path.write_text(f'{HEAD}\nif __name__ == "__main__":\n{main}', encoding="utf-8")
        return path

    return write


def test_plain_python_starts_the_workers(launch: Launch, script: Callable[[str], Path]) -> None:
    """Without a launcher the script runs its function on as many workers as it asks for, and gets what they return."""
    path = script("for workers in 2, 1: print(worker.launch_subprocesses(train, workers, 10.0))")
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    two, one = "{0: [0, 2, 'elastic-run', 5.0], 1: [1, 2, 'elastic-run', 5.0]}", "{0: [0, 1, 'elastic-run', 0.0]}"
    assert job.stdout.splitlines() == [two, one]


def test_a_configuration_says_how(launch: Launch, script: Callable[[str], Path]) -> None:
    """A LaunchConfig is taken as it is: here with the start method and the number of workers."""
    path = script("""
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="local", run_id="own", start_method="fork"
        )
        print(worker.launch_subprocesses(train, config, 3.0))
    """)
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: [0, 1, 'elastic-run', 0.0]}\n"


@pytest.mark.long
def test_under_a_launcher_the_function_is_just_called(launch: Launch, script: Callable[[str], Path]) -> None:
    """A worker of elastic-run starts no others: it calls the function itself."""
    job = launch(
        "--standalone",
        "--nproc-per-node=2",
        script("os.write(1, f'{worker.launch_subprocesses(train, 7, 10.0)}\\n'.encode())"),
        env=QUIET,
    )
    assert job.wait_exit() == 0, job.stderr
    expected = [f"{{{rank}: [{rank}, 2, 'elastic-run', 5.0]}}" for rank in range(2)]
    assert sorted(job.stdout.splitlines()) == expected


@pytest.mark.long
def test_a_worker_that_fails_is_an_exception(launch: Launch, script: Callable[[str], Path]) -> None:
    """What a worker raised is in the ChildFailedError that the script gets."""
    path = script("""
        try:
            worker.launch_subprocesses(train, 2, 1.0, True)
        except ChildFailedError as error:
            print("no such data" in str(error), 1 in error.failures)
    """)
    job = launch(path, program=PYTHON, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "True True\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("0", "ValueError: config=0: at least 1 worker"),
        ("'8'", "TypeError: config='8': it is a number of workers, or a LaunchConfig"),
    ],
)
def test_no_worker_is_no_job(launch: Launch, script: Callable[[str], Path], config: str, message: str) -> None:
    """Fewer than one worker is refused at once, and what is no number; it is named."""
    job = launch(script(f"worker.launch_subprocesses(train, {config})"), program=PYTHON, env=QUIET)
    assert job.wait_exit() == 1
    assert message in job.stderr
