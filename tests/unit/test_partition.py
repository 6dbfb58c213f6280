"""How a node whose store no other node uses finds the others: where it looks, when, and which store counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.core.node.state import BEGINNING, READY, RUNNING, WAITING
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic import partition
from elastic_run.store.errors import SILENT, StoreConnectionError
from elastic_run.store.jobstore.memory import MemoryJobStore

_LEASE = 6.0
_ENDPOINTS = [("a", 1), ("b", 1), ("c", 1)]


def make_store(number: int | None, *, is_running: bool = False) -> MemoryJobStore:
    """Return a store whose job has formed a round; None for a store without a job."""
    store = MemoryJobStore()
    if number is not None:
        write_head(store, number, is_running=is_running)
    return store


def write_head(store: MemoryJobStore, number: int, *, is_running: bool = False) -> None:
    """Say in a store which round its job has formed last."""
    head = messages.Head(0, 1, "node", number, 0, 1, is_running, -1, 0)
    store.write({job_keys.HEAD: messages.to_json(head)})


class Node:
    """A node that serves the store of `b`, on a clock that the test sets.

    Args:
        monkeypatch: Sets the clock.
        here: The last round in the store that it serves.
        others: The stores of other endpoints by name; a name that is left out does not answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: int | None, **others: MemoryJobStore) -> None:
        self.now = 100.0
        self.looked: list[str] = []
        self._stores = others
        self.here = make_store(here)
        self.backend = SimpleNamespace(
            is_host=True, others=[one for one in _ENDPOINTS if one[0] != "b"], rank=1, look_at=self._look_at
        )
        self._sender = SimpleNamespace(member_driver=None)
        context: Any = SimpleNamespace(backend=self.backend, sender=self._sender, config=SimpleNamespace(lease=_LEASE))
        monkeypatch.setattr(partition, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._recovery = partition.PartitionRecovery(context)

    def _look_at(self, endpoint: tuple[str, int], timeout: float) -> MemoryJobStore:
        self.looked.append(endpoint[0])
        if endpoint[0] not in self._stores:
            self.now += timeout
            raise StoreConnectionError(endpoint[0], reason=SILENT)
        return MemoryJobStore(self._stores[endpoint[0]].space)

    def find_at(self, seconds: float, state: str | None = WAITING) -> str | None:
        """Look for the others at a time since the beginning, as a member in this state; None for no member yet."""
        self.now = 100.0 + seconds
        member = SimpleNamespace(member=SimpleNamespace(state=state))
        self._sender.member_driver = None if state is None else member
        return self._recovery.find_others(self.here)


@pytest.mark.parametrize("state", [WAITING, READY])
def test_a_node_that_has_waited_a_lease_goes_where_the_job_has_come_furthest(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Before that the others may still be on their way here."""
    node = Node(monkeypatch, 3, a=make_store(4), c=make_store(5))
    assert [node.find_at(at, state) for at in (0.0, _LEASE - 0.1)] == [None, None]
    assert node.looked == []
    assert node.find_at(_LEASE, state) == "c:1"
    assert node.find_at(_LEASE + 3.0, state) is None, "the wait begins anew there"


@pytest.mark.parametrize("state", [None, BEGINNING, RUNNING])
def test_a_node_that_waits_for_no_round_does_not_look(monkeypatch: pytest.MonkeyPatch, state: str | None) -> None:
    """A running round is left alone, whatever another store says."""
    node = Node(monkeypatch, 3, a=make_store(4))
    assert [node.find_at(at, state) for at in (0.0, _LEASE, 2 * _LEASE)] == [None, None, None]
    assert node.looked == []
    assert node.find_at(2 * _LEASE + 1) is None
    assert node.find_at(3 * _LEASE) is None, "it has not waited a lease yet"
    assert node.find_at(3 * _LEASE + 1) == "a:1"


def test_a_node_that_serves_no_store_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that serves it looks."""
    node = Node(monkeypatch, 3, a=make_store(4))
    node.backend.is_host = False
    assert [node.find_at(at) for at in (0.0, _LEASE)] == [None, None]
    assert node.looked == []


def test_of_equal_stores_the_one_that_the_user_named_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that wait at two stores meet, and do not change places."""
    last = Node(monkeypatch, 3, c=make_store(3))
    first = Node(monkeypatch, 3, a=make_store(3), c=make_store(3))
    assert [node.find_at(at) for node in (last, first) for at in (0.0, _LEASE)] == [None, None, None, "a:1"]


def test_a_running_round_counts_more_than_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stores with the same last round the job goes on in one."""
    node = Node(monkeypatch, 3, c=make_store(3, is_running=True))
    assert [node.find_at(at) for at in (0.0, _LEASE)] == [None, "c:1"]


def test_a_node_stays_in_a_store_whose_job_has_just_come_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that have just come, and made the coordinator ask anew, are about to form a round here."""
    node = Node(monkeypatch, 3, a=make_store(3), c=make_store(3, is_running=True))
    steps = [(2.0, 0, False), (6.0, 3, True), (7.0, 3, False)]  # a Resync, a Recovered, and a Halt of that round
    assert node.find_at(0.0) is None
    for at, number, is_running in steps:
        write_head(node.here, number, is_running=is_running)
        assert node.find_at(at) is None
    assert node.find_at(7.0 + _LEASE - 0.1) is None
    assert node.looked == []
    assert node.find_at(7.0 + _LEASE) == "c:1"


def test_stores_without_a_job_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that nobody has used yet, and garbage, are no place where the job goes on."""
    garbage = MemoryJobStore()
    garbage.write({job_keys.HEAD: b"garbage"})
    for here in (None, 3):
        node = Node(monkeypatch, here, a=make_store(None), c=garbage)
        assert [node.find_at(at) for at in (0.0, _LEASE)] == [None, None]
        assert node.looked == ["a", "c"]


def test_the_next_look_comes_two_seconds_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that does not answer takes a second each time, in which this node writes no heartbeat."""
    node = Node(monkeypatch, 3, c=make_store(3))
    assert [node.find_at(at) for at in (0.0, _LEASE)] == [None, None]
    ended = node.now
    assert node.find_at(ended - 100.0 + 1.9) is None
    assert node.looked == ["a", "c"]
    assert node.find_at(ended - 100.0 + 2.0) is None
    assert node.looked == ["a", "c", "a", "c"]


def test_a_look_takes_no_more_than_a_part_of_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many endpoints are silent, this node is not lost for want of heartbeats."""
    node = Node(monkeypatch, 3)
    node.backend.others = [(name, 1) for name in "acdefgh"]
    assert [node.find_at(at) for at in (0.0, _LEASE)] == [None, None]
    assert node.now - 100.0 - _LEASE <= _LEASE / 3 + 1.0, "the last attempt takes a second"
