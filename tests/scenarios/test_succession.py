"""Scenario scripts of the log: what they may say is in `succession_script`."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scenarios.succession_script import Bed, Place

if TYPE_CHECKING:
    from elastic_run.core.node import messages as node_messages

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


class _BackedUpBed(Bed):
    """Nodes on a store of which a backup is taken before each event."""

    def __init__(self) -> None:
        super().__init__()
        self.backups: list[Place] = []

    def _feed(self, node: str, event: node_messages.Event) -> None:
        self.backups.append(deepcopy(self.store))
        super()._feed(node, event)


def test_no_backup_of_the_start_of_a_job_lets_two_rounds_use_one_workers_store() -> None:
    """A node that comes just after the restore takes no node that may run a round which the backup lacks."""
    job = _BackedUpBed()
    job.play("config 1 2 last_call_timeout=0\n> start a\n> decide a\n> follow")
    assert "Formed" in job.lines[-1]
    for backup in job.backups:
        restored = Bed()
        restored.stores["a"] = restored.store = backup
        restored.play("config 1 2 last_call_timeout=0\n> start b")
        if "b" in restored.coordinators:
            restored.play("> decide b\n> follow")
            assert "StoreAddress(host='b'" in restored.lines[-1]
        assert "StoreAddress(host='a'" not in "".join(restored.lines)
