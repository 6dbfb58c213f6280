"""A worker's signs of life: how often they are written."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from elastic_run.contract import ENV_HEARTBEAT_FILE
from elastic_run.worker import heartbeats

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: A worker without a stdin, whose number its file may get, and a process that it forks.
_FORKS = """
import os
os.close(0)
from elastic_run.worker import heartbeats
heartbeats._INTERVAL = 0.0
heartbeats.heartbeat(1)
if not os.fork():
    heartbeats.heartbeat(2)
    os._exit(0)
os.wait()
"""


def test_heartbeats_are_written_five_times_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a thousand heartbeats in a second five are written, with their number; the first one at once."""
    file = tmp_path / "heartbeats"
    now = 0.0
    monkeypatch.setenv(ENV_HEARTBEAT_FILE, str(file))
    monkeypatch.setattr(heartbeats, "_pulse", heartbeats._Pulse())
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now))
    seen: dict[str, float] = {}
    for step in range(1000):
        now = 50.0 + step / 1000
        heartbeats.heartbeat(step)
        seen.setdefault(file.read_text(encoding="ascii").strip(), step / 1000)
    assert [round(at, 1) for at in seen.values()] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert next(iter(seen)) == "1 step=0"
    assert all(f"{round(at * 1000) + 1} step={round(at * 1000)}" == line for line, at in seen.items())


def test_a_fork_does_not_heartbeat_for_its_parent(tmp_path: Path) -> None:
    """What a worker forks, such as a data loader, writes nothing: a worker that hangs would seem to be alive."""
    file = tmp_path / "heartbeats"
    subprocess.run([sys.executable, "-c", _FORKS], env={ENV_HEARTBEAT_FILE: str(file)}, check=True)
    assert file.read_text(encoding="ascii").split() == ["1", "step=1"]
