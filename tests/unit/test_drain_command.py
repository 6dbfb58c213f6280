"""`elastic-run drain`: what it says where no node is meant."""

from __future__ import annotations

import pytest

from elastic_run.cli.commands import drain
from elastic_run.control.jobs import RunningAgent, RunningJob
from elastic_run.errors import UsageError


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("node7", "job j has no node 'node7'; it has h0, h1 (node rank 0)"),
        ("3", "job j has no node of rank 3 in the round of this node; it has h0, h1 (node rank 0)"),
    ],
)
def test_where_no_node_is_meant_all_are_named(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is one of the round of the node where it was asked; a spare has none."""
    nodes = [
        {"host": "h0", "node_rank": None, "is_leaving": False},
        {"host": "h1", "node_rank": 0, "is_leaving": False},
    ]
    monkeypatch.setattr(drain, "find_job", lambda *_: RunningJob((RunningAgent("", 1, run_id="j", max_nodes=2),)))
    monkeypatch.setattr(drain, "ask", lambda *_, **__: {"nodes": nodes, "members": 1, "missing": 0})
    with pytest.raises(UsageError) as raised:
        drain.main([name])
    assert str(raised.value) == told
