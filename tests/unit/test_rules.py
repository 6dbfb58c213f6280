"""What a node that was told other rules is told."""

from __future__ import annotations

import pytest

from elastic_run.core.messages import Rules
from elastic_run.core.rules import describe_difference

JOB = Rules(1, 4)
DIFFERENCES = {
    "nodes": (Rules(2, 4), "--nnodes is 2:4 here and 1:4 in the job"),
    "window": (
        Rules(1, 4, window_count=3, window_seconds=60.0),
        "--restart-window is 3 per 60 here and none per none in the job",
    ),
    "codes": (
        Rules(1, 4, no_restart_exit_codes=(3, 4)),
        "--no-restart-exit-codes is 3,4 here and none in the job",
    ),
    "truth": (Rules(1, 4, has_successors=True), "successors of the endpoint is yes here and no in the job"),
    "two": (
        Rules(1, 4, max_restarts=2, join_timeout=1.5),
        "--max-restarts is 2 here and 0 in the job; join_timeout is 1.5 here and 600 in the job",
    ),
}


@pytest.mark.parametrize(("node", "text"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_names_the_flag_and_both_values(node: Rules, text: str) -> None:
    """Whoever disagrees learns in what, what it was told and what the job goes by."""
    assert describe_difference(JOB, node) == text


def test_every_rule_is_compared() -> None:
    """No rule can differ without being named."""
    for name in Rules.__slots__:
        before = getattr(JOB, name)
        if isinstance(before, bool):
            value: object = not before
        elif isinstance(before, int | float):
            value = before + 3
        else:
            value = {"split": "continue", "no_restart_exit_codes": (1,)}.get(name, 5)
        changes = {name: value, "max_nodes": 9} if name == "min_nodes" else {name: value}
        other = Rules(**{"min_nodes": 1, "max_nodes": 4, **changes})  # type: ignore[arg-type]  # all are of the right type
        assert describe_difference(JOB, other), name
