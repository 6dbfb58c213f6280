"""Log directories of a job of several nodes that share one."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.support.local_rendezvous import place
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched


def test_a_shared_log_directory(launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path) -> None:
    """Each agent has a directory that names its host; nothing is overwritten, also by two agents on one host."""
    path = worker(
        "say('rank', rank, 'attempt', attempt)\n"
        "if attempt == 0 and rank == 0:\n    open(sys.argv[1], 'w')\n    signal.pause()\n"
        "if attempt == 0:\n    open(sys.argv[1]).read()\n    sys.exit(3)\n"
    )
    gate = tmp_path / "gate"  # opens when both have said their line
    os.mkfifo(gate)
    logs = tmp_path / "logs"
    words = ("--nnodes=2", "--max-restarts=1", f"--log-dir={logs}", "--redirects=3", path, gate)
    port = free_port()
    agents = [launch(*place(port), *words) for _ in range(2)]
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    own = sorted(logs.glob("*_*"))
    host = re.escape(os.uname().nodename)
    assert len(own) == 2
    assert all(re.fullmatch(rf"j_\d{{8}}-\d{{4}}_{host}_[0-9a-f]{{4}}", directory.name) for directory in own)
    said: dict[str, list[str]] = {"attempt_0": [], "attempt_1": []}
    for file in logs.rglob("stdout.log"):
        said[file.relative_to(logs).parts[1]].append(file.read_text().strip())
    assert sorted(said["attempt_0"]) == ["rank 0 attempt 0", "rank 1 attempt 0"]
    assert sorted(said["attempt_1"]) == ["rank 0 attempt 1", "rank 1 attempt 1"]
