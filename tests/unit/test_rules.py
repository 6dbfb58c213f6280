"""What a node that was told other rules is told."""

from __future__ import annotations

import pytest

from elastic_run.core.job.config import describe_difference, describe_settled
from elastic_run.core.protocol.messages import Rules

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
        Rules(1, 4, max_restarts=2, keep_alive_interval=1.5),
        "--max-restarts is 2 here and 0 in the job; keep_alive_interval is 1.5 here and 2 in the job",
    ),
    "settled": (Rules(1, 4, last_call_timeout=1.0, max_backoff=2.0, exit_barrier_timeout=3.0), ""),
}

#: Each node has its own.
OWN = {"exit_barrier_timeout"}


@pytest.mark.parametrize(("node", "text"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_names_the_flag_and_both_values(node: Rules, text: str) -> None:
    """Whoever disagrees learns in what, what it was told and what the job goes by."""
    assert describe_difference(JOB, node) == text


def test_a_settled_time_names_the_flag_and_both_values() -> None:
    """A node whose times have no effect learns which hold, in one sentence."""
    node = Rules(1, 4, last_call_timeout=60.0, min_uptime=2.5, max_restarts=9, exit_barrier_timeout=1.0)
    assert describe_settled(JOB, node) == (
        "the values of the job's first node hold, not those given here: "
        "--min-uptime is none, not 2.5 s; last_call_timeout is 30 s, not 60 s"
    )
    assert describe_settled(JOB, JOB) == ""


def test_every_rule_is_compared() -> None:
    """No rule can differ without being named, refused or settled; none is both."""
    for name in set(Rules.__slots__) - OWN:
        before = getattr(JOB, name)
        if isinstance(before, bool):
            value: object = not before
        elif isinstance(before, int | float):
            value = before + 3
        else:
            value = {"split": "continue", "no_restart_exit_codes": (1,)}.get(name, 5)
        changes = {name: value, "max_nodes": 9} if name == "min_nodes" else {name: value}
        other = Rules(**{"min_nodes": 1, "max_nodes": 4, **changes})  # type: ignore[arg-type]  # all are of the right type
        assert bool(describe_difference(JOB, other)) != bool(describe_settled(JOB, other)), name
