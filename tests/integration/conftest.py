"""Worker programs for the tests of the running launcher."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What every worker of these tests begins with. `say` is one write, so lines of several workers don't mix.
_HEAD = """
import os, signal, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture
def worker(tmp_path: Path) -> Callable[[str], Path]:
    """Write a worker program: `rank`, `attempt` and `say` are there already."""
    count = 0

    def write(body: str) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / f"worker{count}.py"
        path.write_text(_HEAD + textwrap.dedent(body))
        return path

    return write
