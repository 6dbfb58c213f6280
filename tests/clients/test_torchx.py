"""torchx: it calls `torchrun` on PATH, which is ours after `python -m elastic_run.compat --install-torchrun`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched


@pytest.fixture
def torchrun_first(tmp_path: Path) -> dict[str, str]:
    """Put our torchrun first on PATH."""
    directory = tmp_path / "bin"
    command = [sys.executable, "-m", "elastic_run.compat", "--install-torchrun", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    return {"PATH": os.pathsep.join([str(directory), os.environ["PATH"]])}


@pytest.mark.parametrize("nodes", ["1x2", "2x1"])
def test_dist_ddp_runs_on_our_torchrun(
    nodes: str, launch: Callable[..., Launched], torchrun_first: dict[str, str], tmp_path: Path, free_port: int
) -> None:
    """`torchx run -s local_cwd dist.ddp` trains on one node of two workers, and on two nodes of one."""
    words = ("run", "-s", "local_cwd", "-cfg", f"log_dir={tmp_path / 'logs'}", "dist.ddp", "-j", nodes)
    rest = ("--rdzv_port", str(free_port), "--script", str(PROGRAMS / "plain_ddp.py"))
    job = launch(*words, *rest, program=["torchx"], env=torchrun_first, cwd=tmp_path)
    assert job.wait_exit(deadline=90) == 0, job.stderr
    lines = re.findall(r"rank \d of 2, sum \d, .*", job.stdout + job.stderr)
    assert sorted(lines) == [f"rank {rank} of 2, sum 3, elastic-run" for rank in range(2)]
