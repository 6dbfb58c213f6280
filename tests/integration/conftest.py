"""Worker programs, and a module to preload, for the tests of the running launcher."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.output import Jobs
from tests.support.programs import host, module_writer, program, sleeper
from tests.support.store import bench, small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Worker
    from tests.support.programs import Module

__all__ = ["bench", "host", "module", "program", "sleeper", "small", "worker"]

#: What every worker of these tests begins with. `say` is one write, so lines of several workers don't mix.
_HEAD = """
import os, signal, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Write a worker program: `rank`, `attempt` and `say` are there already."""
    count = 0

    def write(body: str) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / f"worker{count}.py"
        path.write_text(_HEAD + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def module(tmp_path: Path) -> Module:
    """Write the module `heavy`, and return the variables with which it can be imported."""
    return module_writer(tmp_path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Return a stack that closes what entered it, the last first."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Start jobs; what still runs at the end is killed."""
    with Jobs(tmp_path / "notes") as opened:
        yield opened
