"""The heartbeats of one node: each replaces the one before it, and tells when that is gone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.rendezvous.elastic.heartbeats import HeartbeatWriter, NodeHeartbeats
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore


@pytest.fixture
def space() -> JobSpace:
    """Give a store."""
    return JobSpace()


def test_a_node_that_is_known_is_not_dropped(space: JobSpace) -> None:
    """The first heartbeat and those after it find nothing amiss, over whatever connection."""
    writer = HeartbeatWriter("n")
    assert writer.is_first
    assert [writer.write(MemoryJobStore(space)) for _ in range(3)] == [False] * 3
    assert not writer.is_first


def test_a_node_that_was_dropped_comes_back(space: JobSpace) -> None:
    """A node whose heartbeat was removed hears it once, and is there again."""
    writer, store = HeartbeatWriter("n"), MemoryJobStore(space)
    writer.write(store)
    store.forget_heartbeats(["n"])
    assert writer.write(store)
    assert store.read_heartbeats(["n"]) != [None]
    assert not writer.write(store)


def test_a_heartbeat_that_is_seen_to_be_gone_is_written_anew(space: JobSpace) -> None:
    """The next one tells it, and is there; without a heartbeat nothing can be gone."""
    writer, store = HeartbeatWriter("n"), MemoryJobStore(space)
    writer.lose()
    assert not writer.write(store)
    writer.lose()
    assert writer.write(store)
    assert not writer.write(store)


def test_a_node_that_goes_leaves_no_heartbeat_behind(space: JobSpace) -> None:
    """A node that has said that it goes doesn't heartbeat again once its heartbeat was removed."""
    writer, store = HeartbeatWriter("n"), MemoryJobStore(space)
    writer.write(store)
    assert not writer.write(store, comes_back=False)
    store.forget_heartbeats(["n"])
    assert [writer.write(store, comes_back=False) for _ in range(2)] == [True, True]
    assert store.read_heartbeats(["n"]) == [None]


def test_an_outage_hides_no_answer(space: JobSpace) -> None:
    """A node that heard that it was dropped, and could not heartbeat again, still tells so over the next connection."""
    writer, store = HeartbeatWriter("n"), MemoryJobStore(space)
    writer.write(store)
    store.forget_heartbeats(["n"])
    heartbeat = store.write_heartbeat

    def fail(node: str, value: bytes, last: bytes | None = None) -> bool:
        if last is None:
            message = "it broke"
            raise StoreConnectionError(message)
        return heartbeat(node, value, last)

    store.write_heartbeat = fail  # type: ignore[method-assign]
    with pytest.raises(StoreConnectionError):
        writer.write(store)
    assert writer.write(MemoryJobStore(space))
    assert store.read_heartbeats(["n"]) != [None]


def make_heartbeats(nodes: int, *, formed_at: float | None) -> NodeHeartbeats:
    """Return the heartbeats of a node in a round of so many nodes, with an interval of 2 s."""
    place = SimpleNamespace(group_world_size=nodes)
    context: Any = SimpleNamespace(
        node="n",
        config=SimpleNamespace(keep_alive_interval=2.0),
        sender=SimpleNamespace(
            member_driver=SimpleNamespace(member=SimpleNamespace(round=SimpleNamespace(place=place))),
            has_passed_exit_barrier=False,
        ),
        signals=SimpleNamespace(formed_at=formed_at),
    )
    return NodeHeartbeats(context, lambda: 0.5)


def test_a_node_looks_at_the_coordinator_eight_times_in_an_interval() -> None:
    """The first look comes a pause after the round; all nodes together look at most 200 times a second."""
    assert make_heartbeats(2, formed_at=None).next_look == math.inf
    assert make_heartbeats(2, formed_at=100.0).next_look == 100.25
    assert make_heartbeats(1000, formed_at=100.0).next_look == 105.0


@pytest.mark.parametrize(
    ("attempts", "draw", "first_at"),
    [(3, 0.0, 102.0), (3, 0.5, 103.0), (1, 0.0, 100.0 + 2.0 / 3), (1, 0.5, 101.0), (2, 0.5, 102.0)],
)
def test_the_first_heartbeat_comes_well_before_a_lease_is_over(attempts: int, draw: float, first_at: float) -> None:
    """After one to two intervals, drawn so that the nodes of a job don't come at once; or thirds of a shorter lease."""
    context: Any = SimpleNamespace(
        node="n",
        config=SimpleNamespace(keep_alive_interval=2.0, lease=2.0 * attempts, first_leases=1),
    )
    heartbeats = NodeHeartbeats(context, lambda: draw)
    heartbeats.begin(100.0)
    assert heartbeats.next_write == pytest.approx(first_at)


@pytest.mark.parametrize(
    ("known_round", "is_coordinator", "first_at"), [(0, False, 112.0), (1, False, 102.0), (0, True, 102.0)]
)
def test_the_first_heartbeat_waits_for_those_that_look_at_it(
    known_round: int, first_at: float, *, is_coordinator: bool
) -> None:
    """Leases before the first round are longer: until then a crowd of new nodes does without heartbeats."""
    job = SimpleNamespace(known_round=known_round)
    member = SimpleNamespace(job=job, coordination=SimpleNamespace(is_coordinator=is_coordinator))
    sender = SimpleNamespace(member_driver=None)
    context: Any = SimpleNamespace(
        node="n", config=SimpleNamespace(keep_alive_interval=2.0, lease=6.0, first_leases=3), sender=sender
    )
    heartbeats = NodeHeartbeats(context, lambda: 0.0)
    heartbeats.begin(98.0)
    heartbeats.hasten_first(99.0)
    assert heartbeats.next_write == 112.0, "this node is in no job yet"
    sender.member_driver = SimpleNamespace(member=member)
    heartbeats.hasten_first(100.0)
    assert heartbeats.next_write == first_at
    member.job = SimpleNamespace(known_round=2)
    heartbeats.next_write = 200.0
    heartbeats.hasten_first(150.0)
    assert heartbeats.next_write == (152.0 if first_at == 112.0 else 200.0), "only the first one is brought forward"
