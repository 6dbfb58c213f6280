"""Scenario scripts of the log: what they may say is in `succession_script`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.succession_script import Bed

SCRIPTS = sorted((Path(__file__).parent / "succession").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """The trace of a scenario is the one that was reviewed."""
    script = path.read_text(encoding="utf-8")
    played = Bed().play(script)
    if os.environ.get("ELASTIC_RUN_REWRITE"):
        path.write_text(played, encoding="utf-8")
        script = played
    assert played == script
