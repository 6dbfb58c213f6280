"""torchx calls `torchrun` on PATH, which is ours; with torchft each replica group is a job of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from tests.support.launch import Launch


# --- torchft: elastic-run restarts a group while the others train on --------------------------------------------------
_LINE = r"^group (\w), rank (\d), restarts (\d), step (\d+): (.*)$"


def test_a_group_that_lost_a_rank_comes_back(
    launch: Launch, free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two groups of two ranks train together; one of them is restarted, and takes the weights of the other."""
    lighthouse = Path(sys.executable).with_name("torchft_lighthouse"), "--bind", f"127.0.0.1:{free_port}"
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{free_port}")
    with subprocess.Popen([*lighthouse, "--min_replicas=1", "--join_timeout_ms=1000"]) as process:
        try:
            flags = ("--nproc-per-node=2", "--max-restarts=1", "--preload=torchft,torch._dynamo")
            words = (*flags, PROGRAMS / "torchft_replica.py")
            jobs = [launch(*words, group, step, tmp_path / "restarted") for group, step in (("a", "-1"), ("b", "5"))]
            codes = [job.wait_exit(deadline=180) for job in jobs]
        finally:
            process.kill()
    assert codes == [0, 0], [job.stderr for job in jobs]
    found = sorted(match.groups() for job in jobs for match in re.finditer(_LINE, job.stdout, re.MULTILINE))
    assert [line[:3] for line in found] == [("a", "0", "0"), ("a", "1", "0"), ("b", "0", "1"), ("b", "1", "1")]
    for rank in range(2):
        assert found[rank][3:] == found[rank + 2][3:]  # the same step and weights in both groups


# --- torchx: torchrun is ours after python -m elastic_run.compat --install-torchrun -----------------------------------
@pytest.fixture
def torchrun_first(tmp_path: Path) -> dict[str, str]:
    """Put our torchrun first on PATH."""
    directory = tmp_path / "bin"
    command = [sys.executable, "-m", "elastic_run.compat", "--install-torchrun", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    return {"PATH": os.pathsep.join([str(directory), os.environ["PATH"]])}


@pytest.mark.parametrize("nodes", ["1x2", pytest.param("2x1", marks=pytest.mark.soak)])
def test_dist_ddp_runs_on_our_torchrun(
    nodes: str, launch: Launch, torchrun_first: dict[str, str], tmp_path: Path, free_port: int
) -> None:
    """`torchx run -s local_cwd dist.ddp` trains on one node of two workers, and on two nodes of one."""
    words = ("run", "-s", "local_cwd", "-cfg", f"log_dir={tmp_path / 'logs'}", "dist.ddp", "-j", nodes)
    rest = ("--rdzv_port", str(free_port), "--script", str(PROGRAMS / "plain_ddp.py"))
    job = launch(*words, *rest, program=["torchx"], env=torchrun_first, cwd=tmp_path)
    assert job.wait_exit(deadline=90) == 0, job.stderr
    lines = re.findall(r"rank \d of 2, sum \d, .*", job.stdout + job.stderr)
    assert sorted(lines) == [f"rank {rank} of 2, sum 3, elastic-run" for rank in range(2)]
