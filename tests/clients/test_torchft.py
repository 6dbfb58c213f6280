"""torchft: each replica group is a job of its own, and elastic-run restarts one while the others train on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.clients.conftest import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.launch import Launched

_LINE = r"^group (\w), rank (\d), restarts (\d), step (\d+): (.*)$"


def test_a_group_that_lost_a_rank_comes_back(
    launch: Callable[..., Launched], free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two groups of two ranks train together; one of them is restarted, and takes the weights of the other."""
    lighthouse = Path(sys.executable).with_name("torchft_lighthouse"), "--bind", f"127.0.0.1:{free_port}"
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{free_port}")
    with subprocess.Popen([*lighthouse, "--min_replicas=1", "--join_timeout_ms=1000"]) as process:
        try:
            flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", PROGRAMS / "torchft_replica.py")
            jobs = [launch(*flags, group, step, tmp_path / "restarted") for group, step in (("a", "-1"), ("b", "5"))]
            codes = [job.wait_exit(deadline=180) for job in jobs]
        finally:
            process.kill()
    assert codes == [0, 0], [job.stderr for job in jobs]
    found = sorted(match.groups() for job in jobs for match in re.finditer(_LINE, job.stdout, re.MULTILINE))
    assert [line[:3] for line in found] == [("a", "0", "0"), ("a", "1", "0"), ("b", "0", "1"), ("b", "1", "1")]
    for rank in range(2):
        assert found[rank][3:] == found[rank + 2][3:]  # the same step and weights in both groups
