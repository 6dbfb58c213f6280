"""Messages between agents: to JSON and back, and what is refused on the way in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_run.core.job.config import JobConfig
from elastic_run.core.protocol import codec, messages
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.messages import Join, NodeEnds, NodeInfo, PreviousRound, StoreAddress, StuckRank

NODE_INFO = NodeInfo("a", 7, 2)
CONFIG = JobConfig(1, 4, no_restart_exit_codes=(3, 4))
STORE_ADDRESS = StoreAddress("10.0.0.1", 4000, use_agent_store=False)
FACTS = (
    Join("n", 1, NODE_INFO, CONFIG, STORE_ADDRESS, 5, PreviousRound("2/1/n", 2, 3, 4, 5)),
    Join("n", 1, NODE_INFO, CONFIG, STORE_ADDRESS),
    messages.Failing("n", 2, 1, "1/1/n"),
    messages.Ready("n", 3, 1, "1/1/n", "failed", STORE_ADDRESS, {"exit_code": 1, "deep": [{"a": None}]}, "x", "y"),
    messages.Leave("n", messages.LAST_SEQUENCE, "died"),
    messages.SeatDead("n", "1/1/n", "n.1", 1, 0, "confirmed", "born 1", "killed"),
    messages.Failing("n", 2, 1, "1/1/n", is_secondary=True),
    messages.FailoverRequest("b:1", "told to stop"),
    Join(
        "n",
        1,
        NodeInfo("a", 7, 2, serves_store=True),
        CONFIG,
        STORE_ADDRESS,
        5,
        PreviousRound("2/1/n", 2, 3, 4, 5, "n.1"),
        highest_round=7,
    ),
    messages.Ready(
        "n",
        3,
        1,
        "1/1/n",
        "stopped",
        STORE_ADDRESS,
        ends=NodeEnds(1, 2, (StuckRank(3, "load", "t.py", 8), StuckRank(4))),
    ),
)
DECISIONS = (
    messages.Claim(1, "n"),
    messages.Resign(1, "n"),
    messages.Form(1, 2, 3, 4, 8),
    messages.Form(1, 2, 3, 4, 8, "n.1"),
    messages.Warn(1, 2),
    messages.Halt(1, 2, "loss", "b"),
    messages.Refuse(1, "n", "why"),
    messages.Failover(1, "b:1", ""),
    messages.Resync(1, "a", "not JSON"),
    messages.End(1, "worker_failed", 3, "", {"a": 1}, ({"b": 2}, {})),
    messages.End(1, "worker_failed", 1, stuck=(StuckRank(3, problem="is stopped"),)),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_a_fact_comes_back_as_it_was(fact: messages.Fact | messages.FailoverRequest) -> None:
    """What is written of a fact is read as an equal one."""
    assert messages.read_fact(messages.to_json(fact)) == fact


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: type(decision).__name__)
def test_a_decision_comes_back_as_it_was(decision: messages.Decision) -> None:
    """What is written of a decision is read as an equal one."""
    assert messages.read_decision(messages.to_json(decision)) == decision


def test_documents_beside_the_log_come_back_as_they_were() -> None:
    """Assignments, heads and states of waiting are read as they were written."""
    assignment = messages.Assignment(1, 0, 2, 0, 4, 0, 4, STORE_ADDRESS, 0, 1, incarnation="n.1")
    head = messages.Head(3, 1, "n", 1, 2, 1, is_running=True, state_slot=3, state_term=1, incarnation="n.1")
    status = messages.Status("gathering", 0, 1, 2, 1, ("a",), (), None)
    assert messages.read_assignment(messages.to_json(assignment)) == assignment
    assert messages.read_head(messages.to_json(head)) == head
    assert messages.read_status(messages.to_json(status)) == status


def _join(**changes: Any) -> bytes:  # noqa: ANN401 - whatever garbage there is
    return json.dumps({**json.loads(messages.to_json(FACTS[0])), **changes}).encode()


GARBAGE = {
    "no JSON": (b"\x80\x04K\x01.", "not JSON"),
    "too deep": (b"[" * 100_000, "not JSON"),
    "no object": (b"[1]", "JSON object was expected, not list"),
    "too long": (b" " * (codec.LARGEST + 1), "more than a message may have"),
    "no protocol": (b"{}", "without a protocol"),
    "a true protocol": (_join(protocol=True), "without a protocol"),
    "unknown kind": (_join(kind="hack"), "'hack' is none of join, failing"),
    "a list as kind": (_join(kind=[]), "is none of"),
    "a decision": (messages.to_json(DECISIONS[0]), "'claim' is none of"),
    "number for a string": (_join(node=3), "Join.node must be str, not 3"),
    "long string": (_join(node="x" * 5000), "Join.node must be str, not 'xxx"),
    "string for a number": (_join(sequence="1"), "Join.sequence must be int, not '1'"),
    "true for a number": (_join(sequence=True), "Join.sequence must be int"),
    "huge number": (_join(sequence=1 << 60), "Join.sequence must be int"),
    "float for a number": (_join(sequence=1.5), "Join.sequence must be int"),
    "part missing": (_join(node_info={"host": "a"}), "NodeInfo.pid is missing"),
    "part of the wrong kind": (_join(node_info=[]), "NodeInfo: an object was expected, not list"),
    "not a truth value": (
        _join(store_address={"host": "a", "port": 1, "use_agent_store": 1}),
        "use_agent_store must be bool",
    ),
    "no workers": (_join(node_info={"host": "a", "pid": 1, "local_world_size": 0}), "0 workers make no sense"),
    "nodes": (_join(config={"min_nodes": 3, "max_nodes": 2}), "3:2 nodes make no sense"),
    "lease": (_join(config={"min_nodes": 1, "max_nodes": 2, "keep_alive_interval": 0}), "lease must be longer"),
    "attempts": (_join(config={"min_nodes": 1, "max_nodes": 2, "keep_alive_max_attempt": 0}), "lease must be longer"),
    "not a list": (_join(config={"min_nodes": 1, "max_nodes": 2, "no_restart_exit_codes": 3}), "must be tuple"),
    "text in a list": (_join(config={"min_nodes": 1, "max_nodes": 2, "no_restart_exit_codes": ["3"]}), "must be tuple"),
    "text as time": (_join(config={"min_nodes": 1, "max_nodes": 2, "join_timeout": "1"}), "must be float"),
    "not a number": (_join(config={"min_nodes": 1, "max_nodes": 2, "join_timeout": float("nan")}), "NaN is no number"),
    "infinity": (b'{"protocol":1,"kind":"join","sequence":1e999}', "is missing"),
    "a list as report": (
        json.dumps({**json.loads(messages.to_json(FACTS[3])), "report": [1]}).encode(),
        r"Ready.report must be Document \| None, not \[1\]",
    ),
    "seat": (
        json.dumps({**json.loads(messages.to_json(FACTS[5])), "status": "x"}).encode(),
        "SeatDead.status: 'x' is none of",
    ),
    "outcome": (json.dumps({**json.loads(messages.to_json(FACTS[3])), "outcome": "x"}).encode(), "'x' is none of"),
}


@pytest.mark.parametrize(("data", "message"), GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_with_what_is_wrong(data: bytes, message: str) -> None:
    """Whatever comes from the network is a message or raises one class of error that says what is wrong."""
    with pytest.raises(MessageError, match=message):
        messages.read_fact(data)


def test_fields_of_a_later_release_are_left_out_and_absent_ones_are_defaults() -> None:
    """Two releases that speak the same protocol may differ by a field."""
    data = json.loads(messages.to_json(FACTS[0]))
    del data["seen"]
    data["mood"] = "good"
    fact = messages.read_fact(json.dumps(data).encode())
    assert isinstance(fact, Join)
    assert fact.seen == -1


def test_another_protocol_is_named() -> None:
    """A fact in another protocol tells who speaks it; a decision raises with both protocols."""
    assert messages.read_fact(_join(protocol=3)) == messages.Foreign("n", 1, 3)
    with pytest.raises(MessageError, match=r"Foreign\.node must be str"):
        messages.read_fact(_join(protocol=3, node=None))
    with pytest.raises(messages.UnknownProtocolError, match="the job uses protocol 9, this node 1") as caught:
        messages.read_decision(b'{"protocol":9}')
    assert caught.value.protocol == 9


def test_a_time_that_is_a_whole_number_is_a_time() -> None:
    """JSON of another writer may say 6 for 6.0."""
    config = codec.from_document(JobConfig, {"min_nodes": 1, "max_nodes": 1, "join_timeout": 6, "min_uptime": None})
    assert isinstance(config.join_timeout, float)
    assert config.lease == 6.0
    assert config.no_restart_exit_codes == ()
