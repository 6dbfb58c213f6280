"""Questions to all nodes of a job: which node a drain means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.job_questions import answer_question

if TYPE_CHECKING:
    from elastic_run.agent.agent_view import AgentView


@pytest.mark.parametrize(
    ("words", "leaves"),
    [("4 node7", True), ("9 node7", True), ("4 1", True), ("3 1", False), ("4 0", False), ("4 n", False), ("", False)],
)
def test_a_node_rank_means_a_node_of_the_round_in_which_it_was_asked(words: str, *, leaves: bool) -> None:
    """A node that sees the question after the next round was formed may have the rank of the node that has left."""
    stops: list[tuple[int, str]] = []
    view: Any = SimpleNamespace(
        context=SimpleNamespace(hostname="node7", group=SimpleNamespace(group_rank=1)),
        find_agent=lambda: SimpleNamespace(round=3),  # it has not begun the round: the warm workers are not ready
        job=SimpleNamespace(place=SimpleNamespace(round=4, group_rank=1)),
        memory={},
        loop=SimpleNamespace(call_soon=lambda call: call()),
        stop=lambda number, sender: stops.append((number, sender)),
    )
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        answer_question(cast("AgentView", view), f"drain {words}", answers.append)
    assert [answer["is_leaving"] for answer in answers] == [leaves] * 2
    assert len(stops) == leaves
