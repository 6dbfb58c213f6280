"""Two nodes with different versions of torch: both say so, at the start and in the report."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

from elastic_run import contract
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched


@pytest.mark.parametrize(
    ("program", "flags", "code"),
    [
        ("raise ValueError('bad batch')", [], 1),
        ("import time; time.sleep(600)", ["--hang-timeout=1", "--hang-action=fail", "--shutdown-timeout=1"], 212),
        ("import time; print('trains', flush=True); time.sleep(600)", [], contract.EXIT_SIGNAL_BASE + signal.SIGTERM),
    ],
    ids=["failure", "hang", "stop"],
)
def test_nodes_tell_that_their_versions_of_torch_differ(
    launch: Callable[..., Launched],
    worker: Callable[[str], Path],
    tmp_path: Path,
    program: str,
    flags: list[str],
    code: int,
) -> None:
    """The version is read from the file that Python would import, and no torch is imported for it."""
    package = tmp_path / "other" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.4.0'\n", encoding="ascii")
    path, port = worker(program), free_port()
    agents = []
    for env in ({}, {"PYTHONPATH": str(tmp_path / "other")}):
        agents.append(launch(*place(port), "--nnodes=2", *flags, path, env=env))
        if not env:
            wait_coordinated(port)
    if code == contract.EXIT_SIGNAL_BASE + signal.SIGTERM:
        for agent in agents:
            agent.wait_line("trains")
        for agent in agents:
            agent.send(signal.SIGTERM)
    assert [agent.wait_exit() for agent in agents] == [code, code]
    for agent in agents:
        started, _, report = agent.stderr.partition("-- elastic-run: ")
        assert "the nodes have different versions of torch: " in started
        said = " ".join(report.split())
        assert "the nodes differ: " in said
        assert "torch 2.4.0 on " in said
        assert f"torch {torch.__version__} on " in said
