"""What keeps a job store over TCPStore's protocol cheap where many nodes use it, and right all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import REFUSED, StoreConnectionError
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore.client import StoreClient
from tests.support.sessions import free_port
from tests.support.store import LOOPBACK, ServedStore
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_JOB = "job"
_NODES = 1000


@pytest.fixture
def store() -> Iterator[C10dJobStore]:
    """Give a job on our server."""
    with ServedStore() as served, C10dJobStore(LOOPBACK, served.port, _JOB, timeout=DEADLINE) as opened:
        yield opened


def _note_looks(store: C10dJobStore, monkeypatch: pytest.MonkeyPatch) -> list[str | bytes]:
    """Note the keys that a store looks at one by one."""
    looked: list[str | bytes] = []
    look = store._client.look

    def noting(keys: Sequence[str | bytes]) -> list[bytes | None]:
        looked.extend(keys)
        return look(keys)

    monkeypatch.setattr(store._client, "look", noting)
    return looked


def test_what_lies_behind_a_gap_is_read_once(store: C10dJobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits for a gap to be filled doesn't ask again for what it has seen behind it."""
    with StoreClient(store._client.host, store._client.port, DEADLINE, f"/elastic-run/{_JOB}/") as raw:
        raw.add("s/facts/count", 1)
        for number in range(100):
            store.append("facts", b"%d" % number)
        looked = _note_looks(store, monkeypatch)
        assert store.read("facts", 0, 0) == ([], 0)
        raw.compare_set("s/facts/1", "", "+late")
        entries, position = store.read("facts", 0, 0)
    assert entries == [b"late", *(b"%d" % number for number in range(100))]
    assert position == 101
    assert looked.count(b"s/facts/50") == 1
    assert store.read("facts", 0, 0)[0] == entries, "another reader's position is as good as ours"


def test_heartbeats_of_many_nodes_are_read_at_once(store: C10dJobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's server two operations read the newest heartbeats of all nodes, if each node has written one."""
    monkeypatch.setattr(store._client, "_is_extended", False)
    nodes = [f"node{number}" for number in range(_NODES)]
    looked = _note_looks(store, monkeypatch)
    assert store.read_heartbeats(nodes) == [None] * _NODES
    for node in nodes:
        store.write_heartbeat(node, b"1")
    assert store.read_heartbeats(nodes) == [1] * _NODES
    looked.clear()
    store.write_heartbeat(nodes[7], b"2")
    assert store.read_heartbeats(nodes) == [2 if number == 7 else 1 for number in range(_NODES)]
    assert not looked
    assert store.read_heartbeats([*nodes, "newcomer"])[-1] is None


def test_a_store_that_nobody_serves_yet_is_told_at_once() -> None:
    """Who doesn't want to try again hears why it failed, without a wait."""
    with pytest.raises(StoreConnectionError) as caught:
        C10dJobStore(LOOPBACK, free_port(), _JOB, timeout=DEADLINE, tries_again=False)
    assert caught.value.reason == REFUSED
