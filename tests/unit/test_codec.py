"""Records as JSON: they come back as they were, and anything else is refused with what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_run.core.config import JobConfig
from elastic_run.core.job import codec
from elastic_run.core.job.codec import MessageError, decode, encode, from_document, to_document
from elastic_run.core.job.documents import NodeInfo, NodeState, RoundEnd, StoreAddress
from elastic_run.records import replace

STATE = NodeState("n", NodeInfo("h", 1, 2), JobConfig(1, 2), StoreAddress("h", 1), known_round=3)


def read(**changes: Any) -> NodeState:
    """Read the document of a state in which some fields are others."""
    return from_document(NodeState, decode(json.dumps({**to_document(STATE), **changes}).encode()))


def config(**changes: Any) -> dict[str, Any]:
    """Return a field of a state."""
    return {"config": {"min_nodes": 1, "max_nodes": 2, **changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04K\x01.", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "JSON object was expected, not list"),
        (b" " * (codec.LARGEST + 1), "more than a message may have"),
        (b'{"a": NaN}', "NaN is no number"),
    ],
    ids=["pickle", "deep", "list", "long", "nan"],
)
def test_bytes_that_are_no_document_are_refused(data: bytes, message: str) -> None:
    """Whatever comes from the network is a JSON object, or raises one class of error."""
    with pytest.raises(MessageError, match=message):
        decode(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node": 3}, "NodeState.node must be str, not 3"),
        ({"node": "x" * 5000}, "NodeState.node must be str, not 'xxx"),
        ({"known_round": "1"}, "NodeState.known_round must be int, not '1'"),
        ({"known_round": True}, "NodeState.known_round must be int"),
        ({"known_round": 1 << 60}, "NodeState.known_round must be int"),
        ({"known_round": 1.5}, "NodeState.known_round must be int"),
        ({"is_failing": 1}, "NodeState.is_failing must be bool"),
        ({"node_info": {"host": "a"}}, "NodeInfo.pid is missing"),
        ({"node_info": []}, "NodeInfo: an object was expected, not list"),
        ({"node_info": {"host": "a", "pid": 1, "local_world_size": 0}}, "0 workers make no sense"),
        ({"ended": {"outcome": "done", "report": [1]}}, r"RoundEnd.report must be Document \| None, not \[1\]"),
        (config(min_nodes=3), "3:2 nodes make no sense"),
        (config(keep_alive_interval=0), "lease must be longer"),
        (config(no_restart_exit_codes=3), "must be tuple"),
        (config(no_restart_exit_codes=["3"]), "must be tuple"),
        (config(join_timeout="1"), "must be float"),
        (config(join_timeout=True), "must be float"),
        (config(join_timeout=10**400), "must be float"),
    ],
)
def test_a_field_of_another_type_is_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the record, the field and what stands there."""
    with pytest.raises(MessageError, match=message):
        read(**changes)


def test_a_number_without_end_is_refused() -> None:
    """JSON can say 1e999, which Python reads as infinity."""
    with pytest.raises(MessageError, match=r"JobConfig\.join_timeout must be float"):
        from_document(JobConfig, decode(b'{"join_timeout": 1e999}'))


def test_a_document_that_is_none_is_refused() -> None:
    """A list where an object is expected is told as such."""
    with pytest.raises(MessageError, match="NodeState: an object was expected, not list"):
        from_document(NodeState, [])


def test_fields_of_a_later_release_are_left_out_and_absent_ones_are_defaults() -> None:
    """Two releases that speak the same protocol may differ by a field."""
    document = {**to_document(STATE), "mood": "good"}
    del document["known_round"]
    assert from_document(NodeState, document).known_round == 0


def test_a_time_that_is_a_whole_number_is_a_time() -> None:
    """JSON of another writer may say 6 for 6.0."""
    found = read(**config(join_timeout=6, min_uptime=None)).config
    assert isinstance(found.join_timeout, float)
    assert found.lease == 6.0


def test_equal_records_are_equal_bytes() -> None:
    """The order of the fields does not matter, and the record comes back as it was."""
    state = replace(STATE, ended=RoundEnd("failed", {"exit_code": 3}))
    document = to_document(state)
    assert encode(dict(reversed(document.items()))) == encode(document)
    assert from_document(NodeState, decode(encode(document))) == state
