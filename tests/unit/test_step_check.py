"""When a launcher compares itself with the others of its Slurm step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from elastic_run.core.node.state import WAITING
from elastic_run.rendezvous.elastic.step_check import StepCheck


def make_check(min_nodes: int, draw: float) -> tuple[StepCheck, Any]:
    """Return the check of a node that waits for its first round, with what its session's threads share."""
    context: Any = SimpleNamespace(
        config=SimpleNamespace(min_nodes=min_nodes),
        signals=SimpleNamespace(formed_at=None),
        member_state=lambda: WAITING,
    )
    backend: Any = SimpleNamespace(is_host=False)
    step: Any = SimpleNamespace(first_host="n1", name="7.0")
    return StepCheck(context, backend, step, draw), context


def test_the_nodes_of_a_large_step_look_one_after_another() -> None:
    """At most 500 nodes look within a second; a step of a few nodes waits for nothing."""
    for nodes, draw, delay in ((2, 0.0, 0.0), (5000, 0.5, 5.0), (500, 1.0, 1.0)):
        check, _ = make_check(nodes, draw)
        assert check.look(100.0) == ""
        assert check.next_look == 100.15 + delay


def test_looks_become_rare_and_end_with_the_first_round() -> None:
    """The first look is due at once, and none after a round was formed."""
    check, context = make_check(2, 0.0)
    assert check.next_look == 0.0
    check.look(100.0)
    assert check.next_look == 100.15
    context.signals.formed_at = 101.0
    assert check.next_look == math.inf
    assert check.look(102.0) == ""
