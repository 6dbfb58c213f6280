"""A node that is cut off stops its workers, where the user asks for it."""

from __future__ import annotations

from elastic_run.core.job.config import JobConfig
from elastic_run.core.node import machine as member
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import READY, RUNNING
from elastic_run.core.protocol.messages import STOPPED, Assignment, NodeInfo, Ready, StoreAddress
from elastic_run.records import replace

_STORE_ADDRESS = StoreAddress("a", 1)
_PLACE = Assignment(
    round=3,
    group_rank=0,
    group_world_size=2,
    base_rank=0,
    world_size=2,
    role_rank=0,
    role_world_size=2,
    master=_STORE_ADDRESS,
    restart_count=0,
    hosts=2,
)


def test_a_member_that_is_cut_off_ends_its_round() -> None:
    """The agent is told to stop its workers, once; what became of them is said when the store answers again."""
    begun, _ = member.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 2), store_address=_STORE_ADDRESS, now=0.0
    )
    running = replace(
        begun,
        state=RUNNING,
        log=replace(begun.log, next_slot=5, term=1),
        job=replace(begun.job, known_round=3),
        round=replace(begun.round, place=_PLACE),
    )
    halting, commands = member.decide(running, node_messages.CutOff(6.2), 10.0)
    assert node_messages.Halted(3, "fenced", "no answer for 6 s") in commands
    again, commands = member.decide(halting, node_messages.CutOff(7.0), 10.8)
    assert not [command for command in commands if isinstance(command, node_messages.Halted)]
    ready, _ = member.decide(again, node_messages.WorkersGone(3, STOPPED, _STORE_ADDRESS), 11.0)
    assert ready.state == READY
    (fact,) = ready.facts.outstanding
    assert isinstance(fact, Ready)
    assert (fact.outcome, fact.sequence) == (STOPPED, 1)


def test_a_node_without_workers_has_nothing_to_stop() -> None:
    """Where no round runs nothing follows."""
    begun, _ = member.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 2), store_address=_STORE_ADDRESS, now=0.0
    )
    assert member.decide(begun, node_messages.CutOff(6.0), 10.0) == (begun, ())
