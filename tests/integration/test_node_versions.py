"""Two nodes with different versions of torch: both say so, at the start and in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.meeting import place, wait_coordinated
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched


def test_nodes_tell_that_their_versions_of_torch_differ(
    launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path
) -> None:
    """The version is read from the file that Python would import, and no torch is imported for it."""
    package = tmp_path / "other" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.4.0'\n", encoding="ascii")
    path, port = worker("raise ValueError('bad batch')"), free_port()
    agents = []
    for env in ({}, {"PYTHONPATH": str(tmp_path / "other")}):
        agents.append(launch(*place(port), "--nnodes=2", path, env=env))
        if not env:
            wait_coordinated(port)
    assert [agent.wait_exit() for agent in agents] == [1, 1]
    for agent in agents:
        started, _, report = agent.stderr.partition("-- elastic-run: ")
        assert "the nodes have different versions of torch: " in started
        said = " ".join(report.split())
        assert "the nodes differ: " in said
        assert "torch 2.4.0 on " in said
        assert f"torch {torch.__version__} on " in said
