"""What the report says of a stderr that the launcher has not seen."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN, clean_environment
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched
    from tests.support.terminal import Terminal

FAILURE = "os.write(2, b'the reason'); os._exit(3)"


def test_a_pipe_is_named(launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path) -> None:
    """With --no-capture the report and failure.json say that stderr went to the launcher's own, a pipe."""
    job = launch("--nproc-per-node=1", "--no-capture", f"--log-dir={tmp_path}", "-r1", worker(FAILURE))
    assert job.wait_exit() == 3
    assert "the reason" in job.stderr
    assert "stderr   (not captured: it went to elastic-run's stderr, a pipe)" in job.stderr
    assert "nothing was written" not in job.stderr
    (file,) = tmp_path.rglob("failure.json")
    assert json.loads(file.read_text())["root_cause"]["stderr_target"] == "elastic-run's stderr, a pipe"


def test_a_file_is_named_by_its_path(worker: Callable[[str], Path], tmp_path: Path) -> None:
    """Where the launcher's stderr is a file, that file has the last lines."""
    errors = tmp_path / "errors of today.log"
    with errors.open("wb") as file:
        command = [*ELASTIC_RUN, "--nproc-per-node=1", "--no-capture", str(worker(FAILURE))]
        subprocess.run(command, env=clean_environment(), stderr=file, timeout=DEADLINE, check=False)
    assert f"it went to elastic-run's stderr, '{errors}')" in " ".join(errors.read_text().split())


def test_a_terminal_is_named(terminal: Terminal, worker: Callable[[str], Path]) -> None:
    """On a terminal the report names the terminal's device."""
    terminal.start("--nproc-per-node=1", "--no-capture", worker(FAILURE))
    assert terminal.wait_exit() == 3
    device = os.ttyname(terminal.slave)
    assert f"(not captured: it went to elastic-run's stderr, {device})" in terminal.output.decode()


def test_a_rank_that_is_filtered_out_wrote_to_nowhere(
    launch: Callable[..., Launched], worker: Callable[[str], Path]
) -> None:
    """With --local-ranks-filter the stderr of other ranks goes to /dev/null where nothing is captured."""
    program = worker("if rank: " + FAILURE + "\ntime.sleep(3600)")
    job = launch("--nproc-per-node=2", "--no-capture", "--local-ranks-filter=0", program)
    assert job.wait_exit() == 3
    assert "(not captured: it went to /dev/null)" in job.stderr


@pytest.mark.parametrize("flags", [(), ("-t3",), ("-r3",), ("-r3", "--no-capture")])
def test_a_silent_worker_is_told_as_such(
    launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A stderr that a pipe or a log file has kept, and that is empty, is a fact."""
    job = launch("--nproc-per-node=1", f"--log-dir={tmp_path}", *flags, worker("os._exit(3)"))
    assert job.wait_exit() == 3
    assert "stderr   (nothing was written)" in job.stderr
