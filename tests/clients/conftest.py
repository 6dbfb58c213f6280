"""What the clients get: a home directory of their own, no network, and their commands on PATH.

The clients are heavy, and none of our dependencies: they live in an environment of their own (tools/setup-clients.sh),
and only `make test-clients` runs these tests. Their versions stand in requirements.txt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.parity import rehearsal

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched

#: As each client's user would write them; they know nothing of elastic-run.
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the clients away from the user's files and from the network."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hugging-face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.fixture
def with_compat(launch: Launch, tmp_path: Path) -> Launch:
    """Run a client's own command as `python -m elastic_run.compat COMMAND …`."""

    def start(*words: str | Path, **options: object) -> Launched:
        return launch(*words, program=[sys.executable, "-m", "elastic_run.compat"], cwd=tmp_path, **options)

    return start


@pytest.fixture
def free_port() -> int:
    """Give a port that nobody listens on, and none that the kernel gives out while a client takes seconds to start."""
    return rehearsal.free_port()
