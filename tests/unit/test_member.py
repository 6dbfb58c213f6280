"""What a node makes of single events, where no scenario comes by."""

from __future__ import annotations

from elastic_run.core.node import machine as membership
from elastic_run.core.protocol.messages import Copy, JobConfig, NodeInfo, Offer
from elastic_run.records import replace


def test_a_preparation_that_a_round_has_followed_is_not_told() -> None:
    """The state was kept late: the round that it prepared, or another, is there already."""
    member, _ = membership.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 3), offer=Offer("a", 1), now=0.0
    )
    member = replace(member, state=membership.READY, known_round=2, incarnation="a.1")
    for prepared in (Copy("a.1", 1, 1, 5, 1), Copy("z.1", 2, 1, 5, 1)):
        assert membership.decide(member, membership.StateKept(prepared), 1.0) == (member, ())
    told, commands = membership.decide(member, membership.StateKept(Copy("a.1", 2, 1, 5, 1)), 1.0)
    assert told.prepared == Copy("a.1", 2, 1, 5, 1)
    assert [type(command) for command in commands] == [membership.Append]
