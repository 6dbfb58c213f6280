"""Programs written for torch, unchanged: a handler of one's own, a launcher of one's own, an agent of one's own.

They are the twins of what torch's documentation shows. Each runs on torch first, which shows that it is written for
torch, and then on elastic-run: through compat without a change, and with nothing but its imports changed. What is
called when, and how failures look, test_custom_agents compares with torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.compat.paths import PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

pytestmark = pytest.mark.long

PROGRAMS = Path(__file__).parents[2] / "data" / "torch_style"
ROOT = Path(__file__).parents[3]

#: Fails in its first life on rank 1, if there is another one; otherwise the ranks are added up.
WORKER = """
import os, sys
import torch, torch.distributed as dist
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] < os.environ["LIVES"]:
    sys.exit(9)
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()}: {total.item():g}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Copy the programs, with the handler's package installed as an installer would."""
    directory = tmp_path / "programs"
    shutil.copytree(PROGRAMS, directory)
    metadata = directory / "meeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: meeting\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\nmeeting = meeting:get_handler\n", encoding="utf-8")
    (directory / "worker.py").write_text(WORKER, encoding="utf-8")
    return directory


@pytest.fixture
def run(programs: Path, launch: Callable[..., Launched]) -> Callable[..., Launched]:
    """Run one of the programs: on `torch`, on elastic-run through `compat`, or with its `imports` changed."""

    def start(how: str, program: str, *words: str, lives: int = 0) -> Launched:
        if how == "imports":
            for path in (programs / program, programs / "meeting" / "__init__.py"):
                path.write_text(_with_our_imports(path.read_text(encoding="utf-8")), encoding="utf-8")
        interpreter = [sys.executable, "-m", "elastic_run.compat"] if how == "compat" else [sys.executable]
        # RES_OPTIONS: torch's store looks up every peer's name, and mustn't wait for a name server.
        environment = {"PYTHONPATH": f"{programs}{os.pathsep}{ROOT}", "LIVES": str(lives), "RES_OPTIONS": "attempts:0"}
        return launch(programs / program, *words, program=interpreter, env=environment, cwd=programs)

    return start


def _with_our_imports(source: str) -> str:
    """Replace torch's paths by ours, the longest first."""
    for path in sorted(PATHS, key=len, reverse=True):
        source = source.replace(f"from {path} import", f"from {PATHS[path]} import")
    assert "torch.distributed.elastic" not in source
    return source


#: The program as it is, on torch's own agent: what the others are compared with, and it changes with torch only.
UNDER_TORCH = pytest.param("torch", "torch", marks=pytest.mark.long)
#: How the program is run, and whose agent it gets.
WAYS = pytest.mark.parametrize(("how", "whose"), [UNDER_TORCH, ("compat", "elastic_run"), ("imports", "elastic_run")])


@WAYS
def test_a_launcher_of_ones_own(how: str, whose: str, run: Callable[..., Launched]) -> None:
    """A local agent made by hand, with a registered handler, runs a function and returns what the workers returned."""
    job = run(how, "launcher.py", "2", "train")
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == f"returned: [(0, 3.0), (1, 3.0)]\nagent: {whose}\n"


@pytest.mark.parametrize(("how", "whose"), [UNDER_TORCH, ("compat", "elastic_run")])
def test_a_launcher_with_torchs_own_rendezvous(how: str, whose: str, run: Callable[..., Launched]) -> None:
    """A program that makes torch's dynamic handler and its store by hand gets our agent with them through compat."""
    job = run(how, "dynamic.py")
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == f"SUCCEEDED: {{0: 3.0, 1: 3.0}}\nagent: {whose}\n"


def test_a_launcher_of_ones_own_learns_of_failures(run: Callable[..., Launched]) -> None:
    """What a function raised in a worker is among the agent's failures."""
    job = run("compat", "launcher.py", "2", "fail")
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == "failed: RuntimeError: out of luck\nagent: elastic_run\n"


@WAYS
def test_an_agent_of_ones_own(how: str, whose: str, run: Callable[..., Launched]) -> None:
    """A subclass of SimpleElasticAgent that starts workers its own way restarts them and succeeds as under torch."""
    job = run(how, "agent.py", "worker.py", "2", "2", lives=1)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    lines = job.stdout.splitlines()
    assert lines[-2:] == ["SUCCEEDED [0, 1] [] 1", f"agent: {whose}"]
    assert sorted(lines[:-2]) == ["rank 0: 3", "rank 1: 3"]


def test_an_agent_of_ones_own_fails(run: Callable[..., Launched]) -> None:
    """When its restarts are used up it fails, with the rank that failed."""
    job = run("compat", "agent.py", "worker.py", "2", "1", lives=9)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == "FAILED [] [1] 0\nagent: elastic_run\n"


@pytest.mark.parametrize("through", [[], ["-m", "elastic_run.compat"]], ids=["plain", "compat"])
def test_a_package_with_a_handler(through: list[str], programs: Path, launch: Callable[..., Launched]) -> None:
    """A package that brings a handler derived from torch's class serves elastic-run as it serves torchrun."""
    environment = {
        "PYTHONPATH": f"{programs}{os.pathsep}{ROOT}",
        "LIVES": "1",
        "RES_OPTIONS": "attempts:0",
    }
    words = ("--rdzv-backend=meeting", "--rdzv-endpoint=127.0.0.1", "--rdzv-id=j", "--nproc-per-node=2")
    program = [sys.executable, *through, "-m", "elastic_run"]
    job = launch(*words, "--max-restarts=1", programs / "worker.py", program=program, env=environment, cwd=programs)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0: 3", "rank 1: 3"]
