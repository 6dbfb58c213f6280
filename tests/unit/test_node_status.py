"""The documents that nodes send where somebody asks: which are sound, and how many are missing."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_run.core.job.node_status import DRAIN, STACKS, STATUS, count_members, is_sound, kind_of


def document(**fields: Any) -> dict[str, Any]:
    """Return a node's document."""
    node = dict.fromkeys(("node_rank", "nodes", "round_uptime", "world_size"))
    node |= dict.fromkeys(("uptime", "round", "restart_count", "max_restarts"), 0)
    node |= dict.fromkeys(("state", "program", "log_dir", "news"), "")
    return {**node, "host": "a", "pid": 1, "workers": [worker()], "round_id": "1/1/a", "round_nodes": 1, **fields}


def worker(**fields: Any) -> dict[str, Any]:
    """Return a worker's part of a document."""
    unknown = dict.fromkeys(("pid", "exit_code", "cpu", "memory", "gpu", "gpu_memory", "silence"))
    return {**unknown, "rank": 0, "local_rank": 0, "state": "running", "last_line": "x", **fields}


def test_a_node_answers_each_kind_of_question_with_its_own_fields() -> None:
    """An unknown question, of another release, is taken for one about the state; unknown fields are passed over."""
    assert is_sound(document(mood="good"))
    assert not is_sound(document(), STACKS)
    drained = {"host": "a", "pid": 1, "node_rank": None, "is_leaving": True, "workers": [], "asked": "drain 3 a"}
    assert is_sound({**drained, "round_id": "", "round_nodes": 0}, "drain 3 a")
    assert [kind_of(question) for question in ("drain 3 a", "stacks", "mood")] == [DRAIN, STACKS, STATUS]


@pytest.mark.parametrize(
    "fields",
    [
        {"host": 3},
        {"state": None},
        {"pid": True},
        {"uptime": float("nan")},
        {"round_id": None},
        {"workers": [{}]},
        {"workers": ["x"]},
        {"workers": [worker(pid=True)]},
        {"workers": [worker(silence="long")]},
        {"workers": [worker(cpu=float("inf"))]},
    ],
)
def test_what_is_no_document_is_passed_over(fields: dict[str, Any]) -> None:
    """A node of another release, or a stranger, can't break the command of a user."""
    assert not is_sound(document(**fields))


@pytest.mark.parametrize(
    ("rounds", "counted"),
    [
        ([], (0, 0)),
        (["", ""], (0, 0)),
        (["r", "r", "r"], (3, 0)),
        (["r", "", "", "r"], (3, 1)),
        (["r", "s", "s", ""], (3, 1)),
        (["r", "r", "r", "r"], (3, 0)),
    ],
)
def test_nodes_are_counted_in_the_round_of_most(rounds: list[str], counted: tuple[int, int]) -> None:
    """Nodes that wait, and nodes of an earlier round, answer for no node of this round."""
    assert count_members([{"round_id": name, "round_nodes": 3 if name else 0} for name in rounds]) == counted
